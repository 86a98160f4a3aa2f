"""Where the time of the small perceptron's step goes in PyTorch, part by part: ampx beside autocast and GradScaler."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _parts import Training, compare
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
    with ampx.init("torch", device="cpu", dtype="bfloat16", loss_scale="dynamic") as amp:
        opt = amp.wrap_optimizer(workload.optimizer(list(model.parameters())))

        def cast_by_hand() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return workload.loss(other(inputs), labels)

        ours = Training(lambda: workload.loss(model(inputs), labels), opt, opt.zero_grad)
        theirs = Training(cast_by_hand, raw, raw.zero_grad)
        rows = compare(ours, theirs, torch.amp.GradScaler("cpu"), quick, set_casting)
        set_casting(True)
    advance()
    return rows


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(row)
