"""What the meter costs in Paddle, in float32, which is all that it computes on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from _metered import metered
from _paired import measure_each
from paddle_step import WORKLOADS, batch_of, paddle, scaled_step

import ampx


def measure(workload: str, quick: bool) -> dict[str, object]:
    """Measure one workload."""
    make, shape, optimizer, pairs, _ = WORKLOADS[workload]
    x, y = batch_of(shape)
    with ampx.init("paddle", level="O0", device="cpu", loss_scale="dynamic") as amp:
        paddle.seed(0)
        model = make()
        wrapped = amp.wrap_optimizer(optimizer(model))
        step = scaled_step(model, wrapped, x, y)
        return metered(workload, step, wrapped.ampx_member.group, pairs, quick)


STEPS = len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each model."""
    paddle.set_device("cpu")
    return measure_each(measure, WORKLOADS, quick, advance)
