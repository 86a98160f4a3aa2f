"""What the meter costs in PyTorch, in bfloat16."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _metered import metered
from workloads import Workload, chosen

import ampx


def measure(workload: Workload, quick: bool) -> dict[str, object]:
    """Measure one workload."""
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

        return metered(workload.name, step, optimizer.ampx_member.group, workload.pairs, quick)


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
