"""What the meter costs in MXNet, in float32, whose steps are the shortest."""

from __future__ import annotations

from collections.abc import Callable

from _metered import metered
from _paired import measure_each
from mxnet_step import WORKLOADS, _built, _trainer, batch_of, scaled_step

import ampx


def measure(workload: str, quick: bool) -> dict[str, object]:
    """Measure one workload."""
    make, shape, optimizer, pairs = WORKLOADS[workload]
    x, y = batch_of(shape)
    with ampx.init("mxnet", device="cpu", level="O0", loss_scale="dynamic") as amp:
        network = _built(make, x)
        wrapped = amp.wrap_optimizer(_trainer(network, optimizer))
        step = scaled_step(network, wrapped, x, y)
        return metered(workload, step, wrapped.ampx_member.group, pairs, quick)


STEPS = len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each model."""
    return measure_each(measure, WORKLOADS, quick, advance)
