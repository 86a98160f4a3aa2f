"""What the meter costs in Paddle, in float32, which is all that it computes on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from _metered import metered
from paddle_step import WORKLOADS, nn, paddle

import ampx


def measure(workload: str, quick: bool) -> dict[str, object]:
    """Measure one workload."""
    make, shape, optimizer, pairs, _ = WORKLOADS[workload]
    generator = np.random.default_rng(0)
    x = paddle.to_tensor(generator.standard_normal(shape, np.float32))
    y = paddle.to_tensor(generator.integers(0, 10, shape[0]))
    with ampx.init("paddle", level="O0", device="cpu", loss_scale="dynamic") as amp:
        paddle.seed(0)
        model = make()
        wrapped, loss_of = amp.wrap_optimizer(optimizer(model)), nn.CrossEntropyLoss()

        def step() -> None:
            loss = loss_of(model(x), y)
            with ampx.scale_loss(loss, wrapped) as scaled:
                scaled.backward()
            wrapped.step()
            wrapped.clear_grad()

        return metered(workload, step, wrapped.ampx_member.group, pairs, quick)


STEPS = len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each model."""
    paddle.set_device("cpu")
    rows = []
    for workload in WORKLOADS:
        rows.append(measure(workload, quick))
        advance()
    return rows
