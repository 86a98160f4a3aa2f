"""What the meter costs, in PyTorch: a step that it looks at beside one that it does not, of which there are 99."""

from __future__ import annotations

import json
import sys

import torch
from _paired import machine, paired
from recipes import by_ampx
from workloads import WORKLOADS, chosen

from ampx_torch import meter

EVERY = meter.EVERY


def measure(name: str, pairs: int) -> dict[str, object]:
    """Time the two kinds of step of one workload in turn; return the share of all steps' time that the meter takes."""
    torch.manual_seed(0)
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    batch, model = workload.batch(), workload.model()
    recipe = by_ampx(workload, model, workload.optimizer(list(model.parameters())), "bfloat16", True)

    def every(steps: int) -> None:
        meter.EVERY = steps

    recipe.before()
    try:
        ratio = paired(
            lambda: recipe.step(batch),
            lambda: recipe.step(batch),
            pairs=pairs,
            before_a=lambda: every(1),
            before_b=lambda: every(sys.maxsize),
        )
    finally:
        every(EVERY)
        recipe.after()
    return {"workload": name, "share": (ratio.ratio - 1) / EVERY, **ratio.to_json()}


if __name__ == "__main__":
    print(json.dumps(machine()))
    for workload in chosen("--quick" in sys.argv):
        print(json.dumps(measure(workload.name, max(workload.pairs // 8, 8))))
