"""The script's backward: the loss is scaled for the script's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import paddle

from ampx_paddle import casting
from ampx_paddle.gradients import collect
from ampx_paddle.losses import scale_loss
from ampx_paddle.sot import untranslated

from .manager import PaddleManaged, PaddleManager


@contextmanager
def backward_scaled(manager: PaddleManager) -> Iterator[None]:
    """Patch `Tensor.backward` and `paddle.autograd.backward`."""
    of_tensor, of_many = paddle.Tensor.backward, paddle.autograd.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        _run(manager, self, lambda scaled: of_tensor(scaled, *args, **kwargs))

    def backward_many(tensors: Any, *args: Any, **kwargs: Any) -> None:
        _run(manager, tensors, lambda scaled: of_many(scaled, *args, **kwargs))

    with (
        mock.patch.object(paddle.Tensor, "backward", backward),
        mock.patch.object(paddle.autograd, "backward", backward_many),
    ):
        yield


@untranslated
def _run(manager: PaddleManager, losses: Any, true: Callable[[Any], None]) -> None:
    several = isinstance(losses, (list, tuple))
    listed = list(losses) if several else [losses]
    if manager.in_backward:  # recompute runs one of its own, whose gradients carry the scale of the outer one
        true(losses)
        return
    if manager.stood_down:
        with manager.records_only("backward"):
            true(losses)
        return
    optimizers = manager.all()
    if not optimizers or not all(isinstance(loss, paddle.Tensor) and loss.is_floating_point() for loss in listed):
        true(losses)
        return
    if (recorder := manager.run.recorder).wants_losses:
        values = [loss.detach() for loss in listed]
        recorder.saw_loss(lambda: sum(float(value.astype("float32").sum()) for value in values))
    with manager.run.recorder.phase("backward"):
        if not manager.scales:
            with _noted(manager):
                true(losses)
        else:
            # Of an optimizer whose step was skipped the script may clear the gradients later, before its own backward.
            ready = [managed for managed in optimizers if not managed.wrapped.are_unknown()] or optimizers
            factor = _bring_together(manager, ready)
            manager.multiplied = True
            with _entered(manager, ready, factor), casting.off(), _noted(manager):
                scaled = [scale_loss(loss, factor) for loss in listed]
                true(scaled if several else scaled[0])
            for managed in ready:
                if collect(managed.raw):
                    managed.wrapped.ampx_member.note_scaled(factor)
        for managed in optimizers:
            managed.zero = False


@contextmanager
def _noted(manager: PaddleManager) -> Iterator[None]:
    """Note that a backward runs."""
    manager.in_backward = True
    try:
        yield
    finally:
        manager.in_backward = False


@contextmanager
def _entered(manager: PaddleManager, optimizers: list[PaddleManaged], factor: float) -> Iterator[None]:
    """Have the wrappers see to gradients that are left, and know whose backward runs."""
    entered: list[PaddleManaged] = []
    try:
        for managed in optimizers:
            with manager.working(managed):
                managed.wrapped.ampx_before_backward(0, factor)
            entered.append(managed)
        yield
    except BaseException:
        for managed in entered:
            managed.wrapped.ampx_abandon_backward(0)
        raise
    for managed in optimizers:
        managed.wrapped.ampx_after_backward(0)


def _bring_together(manager: PaddleManager, optimizers: list[PaddleManaged]) -> float:
    """Have all gradients that wait carry one loss scale, the smallest: Paddle does not tell what a loss reaches."""
    members = [managed.wrapped.ampx_member for managed in optimizers]
    factor = min(
        float(member.factor if member.stage == "scaled" else member.group.ledger.factor(member.group, 0))
        for member in members
    )
    for managed in optimizers:
        manager.rescale(managed, factor)
    return factor
