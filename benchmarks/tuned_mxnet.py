"""What `ampx.tune` decides for the workloads of `mxnet_step.py`, and a hybridized step under it: see `tuned.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mxnet_step
from mxnet_step import autograd, gluon, mx
from tuned import DTYPE, Settings, Side, Task, main, measure_all

import ampx


def _made(workload: str) -> tuple[Any, tuple[Any, Any]]:
    """Return a workload's network, hybridized, and a batch."""
    make, shape, *_ = mxnet_step.WORKLOADS[workload]
    x, y = mxnet_step.batch_of(shape)
    return mxnet_step._built(make, x), (x, y)


class MxnetSide(Side):
    """One way to train in MXNet."""

    framework = "mxnet"
    untimed = 3  # the first is traced

    def __init__(self, workload: str, settings: Settings | None) -> None:
        super().__init__(settings)
        self.network, self.data = _made(workload)
        self.optimizer = mxnet_step.WORKLOADS[workload][2]
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def join(self, other: Side) -> None:
        assert isinstance(other, MxnetSide)
        self.network = other.network

    def start(self, amp: ampx.Amp | None) -> None:
        raw = mxnet_step._trainer(self.network, self.optimizer)
        self.scales = amp is not None
        self.trainer = raw if amp is None else amp.wrap_optimizer(raw)

    def step(self) -> None:
        x, y = self.data
        with autograd.record():
            loss = self.loss(self.network(x), y)
            if self.scales:
                with ampx.scale_loss(loss, self.trainer) as scaled:
                    scaled.backward()
        if not self.scales:
            loss.backward()
        self.trainer.step(len(x))
        mx.nd.waitall()


def tuned(workload: str) -> ampx.TunedPolicy:
    """Return what `tune` decides for a workload."""
    network, (x, y) = _made(workload)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    return ampx.tune(lambda network: loss(network(x), y), network, dtype=DTYPE, framework="mxnet", device="cpu")


def task(workload: str) -> Task:
    """Return a workload as it is tuned and trained."""
    *_, pairs = mxnet_step.WORKLOADS[workload]
    sides = functools.partial(MxnetSide, workload)
    return Task(workload, functools.partial(tuned, workload), sides, min(pairs, 20), 1 if pairs < 60 else 10)


# The smallest and the one with the largest products first: a quick run times these.
TASKS = [task(list(mxnet_step.WORKLOADS)[place]) for place in (0, 2, 1, 3)]
STEPS = len(TASKS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Tune and time each workload."""
    return measure_all(TASKS, quick, advance)


if __name__ == "__main__":
    main(run)
