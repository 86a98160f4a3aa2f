"""The script's backward: the loss is scaled for the script's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import paddle

from ampx_paddle import casting
from ampx_paddle.gradients import collect
from ampx_paddle.losses import scale_loss

from .manager import Managed, Manager


@contextmanager
def backward_scaled(manager: Manager) -> Iterator[None]:
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


def _run(manager: Manager, losses: Any, true: Callable[[Any], None]) -> None:
    several = isinstance(losses, (list, tuple))
    listed = list(losses) if several else [losses]
    if manager.stood_down:
        with manager.records_only("backward"):
            true(losses)
        return
    managed = manager.all()
    if not managed or not all(isinstance(one, paddle.Tensor) and one.is_floating_point() for one in listed):
        true(losses)
        return
    with manager.run.recorder.phase("backward"):
        if not manager.scales:
            true(losses)
        else:
            factor = _bring_together(manager, managed)
            manager.multiplied = True
            with _entered(manager, managed, factor), casting.off():
                scaled = [scale_loss(one, factor) for one in listed]
                true(scaled if several else scaled[0])
            for one in managed:
                if collect(one.raw):
                    one.wrapped.ampx_member.note_scaled(factor)
        for one in managed:
            one.zero = False


@contextmanager
def _entered(manager: Manager, managed: list[Managed], factor: float) -> Iterator[None]:
    """Have the wrappers see to gradients that are left, and know whose backward runs."""
    entered: list[Managed] = []
    try:
        for one in managed:
            manager.work(one, partial(one.wrapped.ampx_before_backward, 0, factor))
            entered.append(one)
        yield
    except BaseException:
        for one in entered:
            one.wrapped.ampx_abandon_backward(0)
        raise
    for one in managed:
        one.wrapped.ampx_after_backward(0)


def _bring_together(manager: Manager, managed: list[Managed]) -> float:
    """Have all gradients that wait carry one loss scale, the smallest: Paddle does not tell what a loss reaches."""
    scales = []
    for one in managed:
        member = one.wrapped.ampx_member
        scales.append(float(member.factor if member.stage == "scaled" else member.group.ledger.factor(member.group, 0)))
    factor = min(scales)
    for one in managed:
        manager.rescale(one, factor)
    return factor
