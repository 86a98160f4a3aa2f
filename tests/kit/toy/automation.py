"""`ampx run` in the toy: how small `automate` can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ampx.modules import name_parameters
from ampx.optimizer import GenericOptimizer
from ampx.run import Automation, Managed, Manager, Run, ScriptBackward, patched
from toy.framework import Module, Optimizer, Tensor


class ToyManager(Manager[Managed]):
    """What is managed in one run."""

    def rates_of(self, raw: Optimizer) -> list[float]:
        """Return its only one."""
        return [raw.lr]


class ToyBackward(ScriptBackward[ToyManager]):
    """How losses are read and multiplied."""

    def reader_of(self, losses: Sequence[Any]) -> Callable[[], float]:
        """Return a function that reads a loss."""
        return lambda: sum(float(loss.data[0]) for loss in losses)

    def run_scaled(self, optimizers: list[Managed], losses: Any, native: Callable[[Any], None]) -> None:
        """Scale the loss for all optimizers."""
        wrapped = [managed.wrapped for managed in optimizers]
        with self.manager.run.session().scale_loss(losses, wrapped) as scaled:
            native(scaled)


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Manage every optimizer that is made inside."""
    run.refuse_preparation()
    with ToyManager(run).region(optimizers_managed, backward_scaled):
        yield


def samples(manager: ToyManager, optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """Return the fields of `SampledGradient` of each parameter, as it is now; outside of modules numbers name them."""
    every = [parameter for managed in manager.managed() for parameter in managed.raw.parameters]
    names = {id(parameter): str(number) for number, parameter in enumerate(every)}
    names |= name_parameters(every, Module, "modules")
    rows = []
    for parameter in optimizer.parameters:
        gradient = None if parameter.grad is None else parameter.grad.data
        weights = parameter.data if parameter.dtype == "float32" else None
        rows.append((names[id(parameter)], (len(parameter.data),), gradient, weights))
    return rows


@contextmanager
def optimizers_managed(manager: ToyManager) -> Iterator[None]:
    """Patch how optimizers are made and step."""
    make, step = Optimizer.__init__, Optimizer.step

    def make_managed(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not manager.stood_down:
            manager.begin()
            manager.keep(Managed(self))

    def managed_step(self: Optimizer) -> None:
        managed = manager.find(self)
        if managed is None or managed.busy or manager.stood_down:
            step(self)
            return
        manager.all()
        manager.take_step(managed.wrapped, managed.wrapped.step, lambda: samples(manager, self), managed)

    with patched(
        (Optimizer, "__init__", lambda _: make_managed),
        (Optimizer, "step", lambda _: managed_step),
        (GenericOptimizer, "step", manager.recorded),
    ):
        yield


@contextmanager
def backward_scaled(manager: ToyManager) -> Iterator[None]:
    """Patch how the framework runs backward: the loss is scaled for all optimizers."""
    backward = ToyBackward(manager)
    with patched((Tensor, "backward", lambda native: lambda loss: backward.run(loss, native))):
        yield


class ToyAutomation(Automation):
    """Manages the optimizers of a script."""

    automate = staticmethod(automate)
