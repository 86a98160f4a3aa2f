"""Where the time of the small perceptron's step goes in PyTorch, part by part: ampx beside autocast and GradScaler."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _parts import Lap, compare
from recipes import set_casting
from workloads import WORKLOADS

import ampx

STEPS = 1
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure the first workload, in bfloat16 with a dynamic loss scale."""
    workload = WORKLOADS[0]
    inputs, labels = workload.batch()
    model, other = workload.model(), workload.model()
    raw = workload.optimizer(list(other.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    with ampx.init("torch", device="cpu", dtype="bfloat16", loss_scale="dynamic") as amp:
        opt = amp.wrap_optimizer(workload.optimizer(list(model.parameters())))

        def ours(lap: Lap) -> None:
            loss = workload.loss(model(inputs), labels)
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
            opt.zero_grad()
            lap("clearing gradients")

        def by_hand(lap: Lap) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = workload.loss(other(inputs), labels)
            lap("forward")
            scaled = scaler.scale(loss)
            lap("scaling the loss")
            scaled.backward()
            lap("backward")
            scaler.step(raw)
            scaler.update()
            lap("check, optimizer, scale")
            raw.zero_grad()
            lap("clearing gradients")

        rows = compare(ours, by_hand, quick, set_casting)
        set_casting(True)
    advance()
    return rows


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(row)
