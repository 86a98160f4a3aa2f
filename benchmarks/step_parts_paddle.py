"""Where the time of the smallest step goes in PaddlePaddle, part by part: ampx beside GradScaler."""

from __future__ import annotations

import sys
from collections.abc import Callable

from _parts import Training, compare
from paddle_step import WORKLOADS, batch_of, native_scaler, nn

import ampx

STEPS = 1
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure the first workload, in float32 with a dynamic loss scale."""
    make, shape, optimizer, _, _ = next(iter(WORKLOADS.values()))
    inputs, labels = batch_of(shape)
    model, other, loss_of = make(), make(), nn.CrossEntropyLoss()
    raw = optimizer(other)
    with ampx.init("paddle", level="O0", device="cpu", loss_scale="dynamic") as amp, native_scaler() as scaler:
        opt = amp.wrap_optimizer(optimizer(model))
        ours = Training(lambda: loss_of(model(inputs), labels), opt, opt.clear_grad)
        theirs = Training(lambda: loss_of(other(inputs), labels), raw, raw.clear_grad)
        rows = compare(ours, theirs, scaler, quick)
    advance()
    return rows


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(row)
