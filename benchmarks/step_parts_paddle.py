"""Where the time of the smallest step goes in PaddlePaddle, part by part: ampx beside GradScaler."""

from __future__ import annotations

import sys
from collections.abc import Callable

from _parts import Lap, compare
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

        def ours(lap: Lap) -> None:
            loss = loss_of(model(inputs), labels)
            lap("forward")
            scaling = ampx.scale_loss(loss, opt)
            scaled = scaling.__enter__()
            lap("scaling the loss")
            scaled.backward()
            lap("backward")
            scaling.__exit__(None, None, None)
            lap("scaling the loss")
            opt.step()
            lap("check, optimizer, scale")
            opt.clear_grad()
            lap("clearing gradients")

        def by_hand(lap: Lap) -> None:
            loss = loss_of(other(inputs), labels)
            lap("forward")
            scaled = scaler.scale(loss)
            lap("scaling the loss")
            scaled.backward()
            lap("backward")
            scaler.step(raw)
            scaler.update()
            lap("check, optimizer, scale")
            raw.clear_grad()
            lap("clearing gradients")

        rows = compare(ours, by_hand, quick)
    advance()
    return rows


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(row)
