"""What one training step costs through ampx in PaddlePaddle, against Paddle's own GradScaler and against no scaler.

Eager Paddle computes float32 on a CPU, so both sides do, and only the loss scaling differs. Paddle's scaler refuses to
be made on a CPU; it is made as if the place were a GPU, and is otherwise Paddle's: `scale`, `step`, `update`. The
second comparison is with plain float32 training, which looks at no gradient: the price of never applying a step that
is not finite. The losses of both sides are compared first.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "No ccache found", UserWarning)  # paddle says so on import
    import paddle

import numpy as np
from _paired import limited, paired
from paddle import nn
from paddle.amp import grad_scaler
from paddle.amp.auto_cast import amp_global_state

import ampx


def _mlp(*sizes: int) -> Callable[[], nn.Layer]:
    def make() -> nn.Layer:
        layers: list[nn.Layer] = []
        for rows, columns in itertools.pairwise(sizes):
            layers += [nn.Linear(rows, columns), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))

    return make


def _cnn() -> nn.Layer:
    layers: list[nn.Layer] = []
    for before, filters in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2D(before, filters, 3, padding=1), nn.BatchNorm2D(filters), nn.ReLU(), nn.MaxPool2D(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(128, 10))


class _Encoder(nn.Layer):
    """Four encoder blocks, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0)
        self.blocks, self.head = nn.TransformerEncoder(block, 4), nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(x).mean(1))


def _sgd(model: nn.Layer) -> Any:
    return paddle.optimizer.Momentum(1e-3, parameters=model.parameters())


def _adam(model: nn.Layer) -> Any:
    return paddle.optimizer.AdamW(1e-3, parameters=model.parameters())


WORKLOADS: dict[str, tuple[Callable[[], nn.Layer], tuple[int, ...], Callable[[nn.Layer], Any], int, int]] = {
    # name: model, input shape, optimizer, pairs, steps in one timing
    "MLP 32-64-64-10, batch 32, Momentum": (_mlp(32, 64, 64), (32, 32), _sgd, 100, 4),
    "MLP 40 layers of 64, batch 64, AdamW": (_mlp(*[64] * 40), (64, 64), _adam, 60, 1),
    "MLP 1024-4096-1024-10, batch 256, AdamW": (_mlp(1024, 4096, 1024), (256, 1024), _adam, 16, 1),
    "CNN 32x32, batch 16, Momentum": (_cnn, (16, 3, 32, 32), _sgd, 30, 1),
    "transformer 4 x 128, batch 8 x 32, AdamW": (_Encoder, (8, 32, 128), _adam, 30, 1),
}
AGAINST = ("GradScaler", "float32, unchecked")


class _GpuTracer:
    _expected_place = types.SimpleNamespace(is_gpu_place=lambda: True)


@contextmanager
def native_scaler() -> Iterator[Any]:
    """Return a region in which Paddle's own scaler scales, on a CPU as well."""
    # Paddle's scaler switches itself off unless the last auto_cast of the process was float16.
    before, amp_global_state().amp_dtype = amp_global_state().amp_dtype, "float16"
    try:
        with mock.patch.object(grad_scaler, "_dygraph_tracer", _GpuTracer):
            scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**16)
        yield scaler
    finally:
        amp_global_state().amp_dtype = before


def batch_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return inputs of a shape, and labels."""
    rng = np.random.default_rng(0)
    x = paddle.to_tensor(rng.standard_normal(shape, np.float32))
    return x, paddle.to_tensor(rng.integers(0, 10, shape[0]))


def scaled_step(model: nn.Layer, optimizer: Any, x: Any, y: Any) -> Callable[[], Any]:
    """Return a training step through ampx, which returns the loss."""
    loss_of = nn.CrossEntropyLoss()

    def step() -> Any:
        loss = loss_of(model(x), y)
        with ampx.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    return step


def measure(workload: str, against: str, quick: bool) -> dict[str, object]:
    """Time one workload through ampx and natively.

    Raises:
        AssertionError: They do not train alike, so that a ratio would mean nothing.
    """
    make, shape, optimizer, pairs, repeat = WORKLOADS[workload]
    x, y = batch_of(shape)
    amp = ampx.init("paddle", level="O0", device="cpu", loss_scale="dynamic")

    def built() -> nn.Layer:
        paddle.seed(0)
        return make()

    ours, theirs = built(), built()
    opt, raw, loss_of = amp.wrap_optimizer(optimizer(ours)), optimizer(theirs), nn.CrossEntropyLoss()
    through_ampx = scaled_step(ours, opt, x, y)
    with native_scaler() if against == "GradScaler" else nullcontext() as scaler, amp:

        def native() -> Any:
            loss = loss_of(theirs(x), y)
            if scaler is None:
                loss.backward()
                raw.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(raw)
                scaler.update()
            raw.clear_grad()
            return loss

        mine, other = [through_ampx().item() for _ in range(3)], [native().item() for _ in range(3)]
        assert mine == other, (mine, other)  # bit for bit: the scale is a power of two
        assert scaler is None or scaler._scale.item() == opt.loss_scale == 2.0**16
        ratio = paired(through_ampx, native, pairs=max(pairs // (8 if quick else 1), 8), repeat=repeat, warmup=3)
    return {"against": against, "workload": workload, "dtype": "float32", **ratio.to_json()}


STEPS = len(AGAINST) * len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every workload against every recipe."""
    paddle.set_device("cpu")
    rows = []
    for against in AGAINST:
        for workload in limited(WORKLOADS):
            rows.append(measure(workload, against, quick))
            advance()
    return rows


if __name__ == "__main__":
    import sys

    for row in run("--quick" in sys.argv):
        named = f"{row['against']:20} {row['workload']:42}"
        times = f"ampx {row['median_a'] * 1e6:8.0f} us  natively {row['median_b'] * 1e6:8.0f} us"
        print(f"{named} {times}  {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]")
