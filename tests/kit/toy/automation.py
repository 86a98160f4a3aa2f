"""`ampx run` in the toy: how small `automate` can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ampx.optimizer import GenericOptimizer
from ampx.run import Automation, Managed, Manager, Run
from toy.framework import Optimizer, Tensor

ToyManager = Manager[Managed]


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Manage every optimizer that is made inside."""
    with ToyManager(run).region(optimizers_managed, backward_scaled):
        yield


@contextmanager
def optimizers_managed(manager: ToyManager) -> Iterator[None]:
    """Patch how optimizers are made and step."""
    make, step = Optimizer.__init__, Optimizer.step

    def make_managed(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not manager.stood_down:
            manager.run.session()
            manager.keep(Managed(self))

    def managed_step(self: Optimizer) -> None:
        managed = manager.find(self)
        if managed is None or managed.busy or manager.stood_down:
            step(self)
            return
        manager.all()
        with manager.run.recorder.phase("step"), manager.working(managed):
            managed.wrapped.step()
        manager.run.recorder.stepped(managed.group)

    with (
        mock.patch.object(Optimizer, "__init__", make_managed),
        mock.patch.object(Optimizer, "step", managed_step),
        mock.patch.object(GenericOptimizer, "step", manager.recorded(GenericOptimizer.step)),
    ):
        yield


@contextmanager
def backward_scaled(manager: ToyManager) -> Iterator[None]:
    """Patch how the framework runs backward: the loss is scaled for all optimizers."""
    backward = Tensor.backward

    def scaled_backward(self: Tensor) -> None:
        if manager.stood_down:
            with manager.records_only("backward"):
                backward(self)
            return
        wrapped = [managed.wrapped for managed in manager.all()]
        if not wrapped:
            backward(self)
            return
        if manager.run.recorder.observer is not None:
            manager.run.recorder.observer.loss(lambda: float(self.data[0]))
        with manager.run.recorder.phase("backward"), manager.run.session().scale_loss(self, wrapped) as scaled:
            backward(scaled)

    with mock.patch.object(Tensor, "backward", scaled_backward):
        yield


class ToyAutomation(Automation):
    """Manages the optimizers of a script."""

    automate = staticmethod(automate)
