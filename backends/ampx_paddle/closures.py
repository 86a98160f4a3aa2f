"""Steps with a closure: once for most optimizers, as often as it likes for LBFGS."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import paddle

from ampx.errors import ProtocolError

from . import casting

if TYPE_CHECKING:
    from .optimizer import AmpOptimizer


class _Overflow(Exception):  # noqa: N818 - never seen outside this module
    """An evaluation's gradients are not finite."""


def needs_closure(optimizer: Any) -> bool:
    """Return whether a raw optimizer evaluates a closure in its step."""
    return isinstance(optimizer, paddle.optimizer.LBFGS)


def refuse_missing(call: str) -> None:
    """Raise where such an optimizer is stepped without one.

    Raises:
        ProtocolError: Always.
    """
    raise ProtocolError(
        f"{call} was called without a closure on LBFGS, which evaluates the loss several times in a step; accepted: "
        f"opt.step(closure). Pass a function that clears the gradients, runs backward inside scale_loss and returns "
        f"the loss."
    )


def step_with_closure(owner: AmpOptimizer, closure: Callable[[], Any]) -> Any:
    """Step a raw optimizer that evaluates its closure as often as it likes.

    Every evaluation's gradients are made true before the optimizer sees them. When one overflows (or the closure
    raises), parameters and state are put back as they were before the step.

    Returns:
        What the raw optimizer returned; the loss of the overflowing evaluation where the step was skipped.

    Raises:
        NotScaledError: The closure ran backward outside `scale_loss`.
        ProtocolError: The closure did not clear the gradients of its former evaluation.

    Sync: as the optimizer; one a dtype and evaluation beyond.
    """
    cast = paddle.amp.is_autocast_enabled()
    losses: list[Any] = []
    finite: dict[int, bool] = {}

    def evaluate() -> Any:
        # The raw optimizer runs with casting off; the user's closure runs as the user called step.
        with owner.casting_region(True) if cast else nullcontext():
            loss = closure()
        losses.append(loss)
        for loss_id, found in owner.check_evaluation().items():
            finite[loss_id] = found and finite.get(loss_id, True)
        if not all(finite.values()):
            raise _Overflow
        if owner.ampx_member.stage == "unscaled":
            owner.ampx_member.begin_change()  # the optimizer uses these gradients, once
        if isinstance(loss, paddle.Tensor) and loss.dtype in (paddle.float16, paddle.bfloat16):
            return loss.astype("float32")  # LBFGS makes its curvature in the dtype of the loss
        return loss

    before = _Snapshot(owner.optimizer)
    off: AbstractContextManager[Any] = casting.off() if cast else nullcontext()
    result = None
    try:
        with off:
            try:
                result = owner.optimizer.step(evaluate)
            except _Overflow:
                result = losses[-1]
        if not all(finite.values()):
            before.restore()
    except BaseException:
        before.restore()
        owner.drop_pending()
        raise
    if finite:
        owner.close_step(finite)
    else:
        owner.drop_pending()
    return result


class _Snapshot:
    """Parameters and state of LBFGS before a step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._weights = [(one, one.detach().clone()) for one in self._optimizer._params]
        self._state = {name: _copy(value) for name, value in self._optimizer.state.items()}

    def restore(self) -> None:
        with paddle.no_grad():
            for parameter, value in self._weights:
                paddle.assign(value, parameter)
        self._optimizer.state.clear()
        self._optimizer.state.update({name: _copy(value) for name, value in self._state.items()})


def _copy(value: Any) -> Any:
    """Copy what LBFGS writes in place: its tensors and lists, but not the tensors in the lists."""
    if isinstance(value, paddle.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
