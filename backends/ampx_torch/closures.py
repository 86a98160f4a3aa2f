"""Optimizers that take a closure and may evaluate it several times, such as LBFGS."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ampx.errors import UnsupportedByBackendError
from ampx.provenance import UNKNOWN

from . import casting

if TYPE_CHECKING:
    from .step import AmpOptimizer


class _Overflow(Exception):  # noqa: N818 - never seen outside this module
    """An evaluation's gradients are not finite."""


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer evaluates its closure once, before it touches anything."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def step_with_closure(owner: AmpOptimizer, closure: Callable[[], Any]) -> Any:
    """Step a raw optimizer that evaluates its closure as often as it likes; return what it returned.

    Every evaluation's gradients are unscaled before the optimizer sees them. When one overflows (or the closure
    raises), parameters and state are put back as they were before the step; the loss is that evaluation's.

    Sync: one a device and evaluation.
    """
    if owner.masters is not None:
        raise UnsupportedByBackendError(
            f"step got a closure for {type(owner.optimizer).__name__} with master weights; it may change the masters "
            f"between evaluations, which the model would not see. Use level='O1' with this optimizer."
        )
    member, mixer = owner.ampx_member, owner.mixer
    if member.stage in ("changing", "interrupted"):
        member.check_step()
    device_type = owner.device_type or "cpu"
    was_on = owner.device_type is not None and torch.is_autocast_enabled(device_type)
    losses: list[Any] = []
    finite: dict[int, bool] = {}

    def check() -> None:
        if not owner.collect_pending():
            return
        owner.check_and_unscale()
        for loss_id, fine in owner.findings.take().items():
            finite[loss_id] = finite.get(loss_id, True) and fine
        if not all(finite.values()):
            member.begin_change()
            raise _Overflow
        owner.clip()

    def evaluate() -> Any:
        # Between evaluations the raw optimizer moves the weights, which must not be taken for where they belong.
        member.end_change()
        casting.forget_weights()  # the optimizer may have moved the weights since the last evaluation
        mixer.begin_evaluation()
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
        member.begin_change()
        return losses[-1]

    before = _Snapshot(owner)
    try:
        if member.stage != "idle":  # SAM and its like get their first gradients before the step
            check()
        member.begin_change()
        mixer.evaluating = member.mixes = True
        result = owner.apply(False, None, evaluate)
    except _Overflow:
        before.restore()
        result = losses[-1] if losses else None
        owner.skip()
    except BaseException:
        member.begin_change("interrupted")
        before.restore()
        owner.reset_after_exception()
        owner.forget()
        owner.provenance.note(owner.leaves(), UNKNOWN)
        raise
    mixer.evaluating = False
    if finite:
        owner.close(finite)
    else:
        owner.forget()
    return result


class _Snapshot:
    """Parameters, options and state of an optimizer before a step."""

    def __init__(self, owner: AmpOptimizer) -> None:
        optimizer = self._optimizer = owner.optimizer
        self._weights = [(p, p.detach().clone()) for p in owner.gradients.parameters()]
        self._options = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._state = {key: copy.deepcopy(value, _history(optimizer)) for key, value in optimizer.state.items()}

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self._weights:
                parameter.copy_(value)
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _history(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return a memo that spares LBFGS's history, 2 × `history_size` copies of the parameters never written again."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return {}
    states = optimizer.state.values()
    return {
        id(tensor): tensor for state in states for name in ("old_dirs", "old_stps") for tensor in state.get(name, ())
    }
