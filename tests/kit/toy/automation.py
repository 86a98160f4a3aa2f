"""`ampx run` in the toy: how small the verb `automate` can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ampx.run import Run
from toy.framework import Optimizer, Tensor


class Managed:
    """An optimizer of the script, what `wrap_optimizer` made of it, and its place in the recorder."""

    def __init__(self, run: Run, raw: Optimizer) -> None:
        self.raw = raw
        self.wrapped = run.session().wrap_optimizer(raw)
        self.group = run.recorder.add_optimizer(type(raw).__name__, self.wrapped.loss_scale)
        self.stepping = False


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Manage every optimizer that is made inside."""
    make, step, backward = Optimizer.__init__, Optimizer.step, Tensor.backward
    optimizers: list[Managed] = []

    def make_managed(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        optimizers.append(Managed(run, self))

    def scaled_backward(self: Tensor) -> None:
        if run.amp is None:
            backward(self)
            return
        with (
            run.recorder.phase("backward"),
            run.amp.scale_loss(self, [managed.wrapped for managed in optimizers]) as scaled,
        ):
            backward(scaled)

    def managed_step(self: Optimizer) -> None:
        managed = next((managed for managed in optimizers if managed.raw is self), None)
        if managed is None or managed.stepping:  # made before, or called by the wrapper: gradients are true
            step(self)
            return
        managed.stepping = True
        try:
            with run.recorder.phase("step"):
                managed.wrapped.step()
        finally:
            managed.stepping = False
        run.recorder.stepped(managed.group)

    patches = (
        mock.patch.object(Optimizer, "__init__", make_managed),
        mock.patch.object(Optimizer, "step", managed_step),
        mock.patch.object(Tensor, "backward", scaled_backward),
    )
    try:
        with patches[0], patches[1], patches[2]:
            yield
    finally:
        run.close()
