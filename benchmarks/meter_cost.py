"""What the meter costs, in PyTorch: a step that it looks at beside one that it does not, of which there are 99."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _paired import paired
from workloads import Workload, chosen

import ampx
from ampx.numerics.meter import EVERY


def measure(workload: Workload, quick: bool) -> dict[str, object]:
    """Time the two kinds of step of a workload in turn; return the share of all steps' time that the meter takes."""
    torch.manual_seed(0)
    batch, model = workload.batch(), workload.model()
    raw = workload.optimizer(list(model.parameters()))
    with ampx.init("torch", device="cpu", dtype="bfloat16", loss_scale="dynamic") as amp:
        optimizer = amp.wrap_optimizer(raw, max_grad_norm=workload.max_grad_norm)

        def step() -> None:
            loss = workload.loss(model(batch[0]), batch[1])
            with ampx.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

        def every(steps: int) -> None:
            optimizer.ampx_member.group.meter_every = steps

        ratio = paired(
            step,
            step,
            pairs=max(workload.pairs // (8 if quick else 1), 8),
            before_a=lambda: every(1),
            before_b=lambda: every(sys.maxsize),
        )
    return {"workload": workload.name, "share": (ratio.ratio - 1) / EVERY, "every": EVERY, **ratio.to_json()}


WORKLOADS = chosen(quick=True)
STEPS = len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each model."""
    rows = []
    for workload in WORKLOADS:
        rows.append(measure(workload, quick))
        advance()
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        print(f"{row['workload']:58} {100 * row['share']:6.3f} % of all steps; ratio {row['ratio']:.3f}")
