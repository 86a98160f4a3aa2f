"""Optimizers that take a closure and may evaluate it several times, such as LBFGS."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import casting

if TYPE_CHECKING:
    from .optimizer import AmpOptimizer


class _Overflow(Exception):  # noqa: N818 - never seen outside this module
    """An evaluation's gradients are not finite."""


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer evaluates its closure once, before it touches anything. Sync: none."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def step_with_closure(owner: AmpOptimizer, closure: Callable[[], Any]) -> Any:
    """Step a raw optimizer that evaluates its closure as often as it likes.

    Every evaluation's gradients are made true before the optimizer sees them. When one overflows (or the closure
    raises), parameters and state are put back as they were before the step.

    Returns:
        What the raw optimizer returned; the loss of the overflowing evaluation where the step was skipped.

    Sync: one a device and evaluation.
    """
    member, mixer = owner.ampx_member, owner.mixer
    device_type = owner.device_type or "cpu"
    was_on = owner.device_type is not None and torch.is_autocast_enabled(device_type)
    losses: list[Any] = []
    loss_ids: dict[int, bool] = {}
    counted = False

    def check() -> None:
        nonlocal counted
        gradients = owner.ready_gradients()
        if not gradients:
            return
        loss_ids.update(dict.fromkeys(member.factors, True))
        owner.check_and_unscale(gradients)
        counted = True
        if not owner.checked_finite():
            raise _Overflow
        owner.clip_gradients()

    def evaluate() -> Any:
        # The raw optimizer runs with casting off; the user's closure runs as the user called step.
        if was_on:
            casting.switch(device_type, True)
        try:
            with torch.enable_grad():
                losses.append(closure())
        finally:
            if was_on:
                casting.switch(device_type, False)
        check()
        return losses[-1]

    before = _Snapshot(owner)
    mixer.reevaluating = member.mixes = True
    try:
        if member.stage == "scaled":  # SAM and its like get their first gradients before the step
            check()
        result = owner.run_raw(evaluate)
        finite = True
    except _Overflow:
        before.restore()
        result, finite = losses[-1] if losses else None, False
        owner.optimizer._opt_called = True  # type: ignore[attr-defined]
    except BaseException:
        before.restore()
        mixer.reevaluating = False
        owner.forget()
        raise
    mixer.reevaluating = False
    if counted:
        if not member.factors:
            member.factors = dict.fromkeys(loss_ids, member.group.ledger.factor(member.group, min(loss_ids)))
        owner.close_step(dict.fromkeys(loss_ids, finite))
    else:
        owner.forget()
    return result


class _Snapshot:
    """Parameters and state of an optimizer before a step."""

    def __init__(self, owner: AmpOptimizer) -> None:
        self._optimizer = owner.optimizer
        self._weights = [(p, p.detach().clone()) for p in owner.gradients.parameters()]
        self._state = {key: copy.deepcopy(value) for key, value in owner.optimizer.state.items()}

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self._weights:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
