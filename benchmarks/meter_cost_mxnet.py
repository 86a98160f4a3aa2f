"""What the meter costs in MXNet, in float32, whose steps are the shortest."""

from __future__ import annotations

from collections.abc import Callable

from _metered import metered
from mxnet_step import WORKLOADS, _built, _trainer, autograd, gluon, mx

import ampx


def measure(workload: str, quick: bool) -> dict[str, object]:
    """Measure one workload."""
    make, shape, optimizer, pairs = WORKLOADS[workload]
    mx.random.seed(0)
    x, y = mx.nd.random.normal(shape=shape), mx.nd.random.randint(0, 10, (shape[0],)).astype("float32")
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    with ampx.init("mxnet", device="cpu", level="O0", loss_scale="dynamic") as amp:
        network = _built(make, x)
        wrapped = amp.wrap_optimizer(_trainer(network, optimizer))

        def step() -> None:
            with autograd.record():
                loss = loss_of(network(x), y)
                with ampx.scale_loss(loss, wrapped) as scaled:
                    scaled.backward()
            wrapped.step(len(x))
            mx.nd.waitall()

        return metered(workload, step, wrapped.ampx_member.group, pairs, quick)


STEPS = len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each model."""
    rows = []
    for workload in WORKLOADS:
        rows.append(measure(workload, quick))
        advance()
    return rows
