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
    listed = list(losses) if isinstance(losses, (list, tuple)) else [losses]
    if manager.in_backward:  # recompute runs one of its own, whose gradients carry the scale of the outer one
        factor = manager.handed_out
        if factor == 1.0:
            true(losses)
        else:  # the script's own got true ones
            with manager.in_region(factor), paddle.enable_grad():
                _scaled(manager, losses, factor, true)
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
            with manager.in_region(1.0):
                true(losses)
        else:
            # Of an optimizer whose step was skipped the script may clear the gradients later, before its own backward.
            ready = [managed for managed in optimizers if not managed.wrapped.are_unknown()] or optimizers
            factor = _bring_together(manager, ready)
            manager.multiplied = True
            manager.check_programs()
            with _entered(manager, ready, factor), casting.off(), manager.in_region(factor):
                _scaled(manager, losses, factor, true)
            for managed in ready:
                manager.check_main_grads(managed)
                if collect(managed.raw):
                    managed.wrapped.ampx_member.note_scaled(factor)
                    if managed.kept:
                        manager.reveal(managed)
        for managed in optimizers:
            managed.zero = False


def _scaled(manager: PaddleManager, losses: Any, factor: float, true: Callable[[Any], None]) -> None:
    several = isinstance(losses, (list, tuple))
    scaled = [scale_loss(loss, factor) for loss in losses] if several else scale_loss(losses, factor)
    try:
        true(scaled)
    except OSError:  # which Paddle makes of what is raised in hooks and PyLayers
        if manager.run.refusal is None:
            raise
        raise manager.run.refusal from None


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
