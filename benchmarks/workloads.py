"""The models that the benchmarks train in PyTorch: four kinds, each with its data, loss, optimizer and clipping.

Random data: the time of a step depends on shapes only. Training to an accuracy is in `convergence.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from _paired import limited
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """One thing to train.

    Attributes:
        name: Its name in the tables.
        model: Makes the model.
        batch: Makes one batch: inputs and labels, `(N,)` integers or `(N, T)` for sequences.
        optimizer: Makes the optimizer.
        max_grad_norm: Bound on the gradients' norm, or None.
        pairs: Pairs that a full run times.
        sparse: Its gradients are partly sparse, which the peers' clipping and unscaling may not know.
        quick: A quick run times it: each model once.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    max_grad_norm: float | None = None
    pairs: int = 40
    sparse: bool = False
    quick: bool = True

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy: a float32 scalar."""
        return functional.cross_entropy(output.float().flatten(0, -2), labels.flatten())


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Build two hidden layers and a classifier of ten classes."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs), nn.ReLU(), nn.Linear(outputs, 10)
    )


class Residual(nn.Module):
    """Two convolutions with batch norms and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def cnn() -> nn.Module:
    """Build a small residual network for 32x32 images: three stages of two blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for inputs, outputs, stride in ((32, 32, 1), (32, 64, 2), (64, 128, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Transformer(nn.Module):
    """A stack of causal transformer blocks over symbols, with a learned position."""

    def __init__(self, symbols: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.symbols(x) + self.positions, mask=self.mask, is_causal=True))


class Recommender(nn.Module):
    """Two large embedding tables with sparse gradients under a small classifier."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width, sparse=True) for _ in range(2)])
        self.top = mlp(2 * width, 256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], dim=-1))


def _random(shape: tuple[int, ...]) -> Callable[[], Batch]:
    return lambda: (torch.randn(*shape), torch.randint(0, 10, (shape[0],)))


def _symbols(batch: int, length: int, symbols: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(0, symbols, (batch, length)), torch.randint(0, symbols, (batch, length)))


def _rows(batch: int, rows: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(0, rows, (batch, 2)), torch.randint(0, 10, (batch,)))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _fused_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, fused=True)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


SMALL = "MLP 32-64-64-10, batch 32"
LARGE = "MLP 1024-4096-1024-10, batch 256"

WORKLOADS: tuple[Workload, ...] = (
    Workload(f"{SMALL}, SGD", lambda: mlp(32, 64, 64), _random((32, 32)), _sgd, pairs=400),
    Workload(f"{SMALL}, AdamW", lambda: mlp(32, 64, 64), _random((32, 32)), _adamw, pairs=400, quick=False),
    Workload(f"{SMALL}, AdamW fused", lambda: mlp(32, 64, 64), _random((32, 32)), _fused_adamw, pairs=400, quick=False),
    Workload(f"{LARGE}, SGD fused", lambda: mlp(1024, 4096, 1024), _random((256, 1024)), _fused_sgd),
    Workload(f"{LARGE}, AdamW", lambda: mlp(1024, 4096, 1024), _random((256, 1024)), _adamw, quick=False),
    Workload(f"{LARGE}, AdamW fused", lambda: mlp(1024, 4096, 1024), _random((256, 1024)), _fused_adamw, quick=False),
    Workload("residual CNN 32x32, batch 16, SGD", cnn, _random((16, 3, 32, 32)), _sgd),
    Workload(
        "transformer 4 x 128, 8 x 64 symbols, AdamW fused, clipped",
        lambda: Transformer(128, 128, 4, 64),
        _symbols(8, 64, 128),
        _fused_adamw,
        max_grad_norm=1.0,
    ),
    Workload(
        "embeddings 2 x 100,000 x 32, sparse, batch 256, SGD",
        lambda: Recommender(100_000, 32),
        _rows(256, 100_000),
        _plain_sgd,
        pairs=200,
        sparse=True,
    ),
)


def chosen(quick: bool) -> tuple[Workload, ...]:
    """Return what a run times: all of it, or each model once."""
    return tuple(limited(workload for workload in WORKLOADS if workload.quick or not quick))
