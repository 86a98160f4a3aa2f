"""Models, optimizers, and one training step in two ways: through ampx, and as one writes it by hand in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ampx

# Overflow pattern of fourteen steps and the scale after each, from 2**16 with growth every third finite step.
PATTERN = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
REFERENCE = [65536, 65536, 131072, 65536, 65536, 65536, 32768, 16384, 16384, 16384, 32768, 32768, 32768, 65536]


def mlp(width: int = 16, layers: int = 2, classes: int = 4) -> nn.Module:
    """Return a perceptron for inputs of `width` features."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


class Transformer(nn.Module):
    """Encoder layers, the mean over the sequence, and a classifier."""

    def __init__(self, width: int, heads: int, layers: int, classes: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def optimizers(device: str) -> dict[str, tuple[Callable[[Any], torch.optim.Optimizer], tuple[bool | None, ...]]]:
    """Return the optimizers to check, by name, each with the values of `device_scale` that it takes."""
    cases: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], tuple[bool | None, ...]]] = {
        "SGD foreach": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True), (None,)),
        "Adam foreach": (lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True), (None,)),
        "SGD fused": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True), (False, True)),
        "Adam fused": (lambda p: torch.optim.Adam(p, lr=1e-2, fused=True), (False, True)),
        "AdamW fused": (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), (None,)),
    }
    if device != "cpu":
        cases["Adam capturable"] = (lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True), (None,))
        cases["Adam fused capturable"] = (lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, capturable=True), (None,))
    return cases


def through_ampx(model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Take one step; process-wide casting is on."""
    opt.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    return loss


def by_hand(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    x: torch.Tensor,
    y: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Take one step as the documentation of torch has it."""
    opt.zero_grad()
    with torch.autocast(x.device.type, dtype=dtype):
        loss = functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss


def backward(model: nn.Module, opt: Any, x: torch.Tensor, overflow: bool) -> None:
    """Make gradients; on overflow one element of one of them is infinite."""
    with ampx.scale_loss(model(x).float().square().mean(), opt) as scaled:
        scaled.backward()
    if overflow:
        next(model.parameters()).grad.view(-1)[:1].fill_(float("inf"))


def bits(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copy all weights and all of the optimizer's state."""
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def same(first: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Compare bit by bit."""
    return len(first) == len(other) and all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
