"""The step of LBFGS, which evaluates its closure as often as it likes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import paddle

from ampx.errors import ProtocolError
from ampx.events import UNCHECKED

from . import casting
from .step import AmpOptimizer


class _Overflow(Exception):  # noqa: N818 - never seen outside this module
    """An evaluation's gradients are not finite."""


class ClosureOptimizer(AmpOptimizer):
    """LBFGS with a loss scale: every evaluation's gradients are unscaled before it sees them."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step; where an evaluation overflows or raises, parameters and state are put back as they were before.

        Args:
            closure: A function that clears the gradients, runs backward inside `scale_loss` and returns the loss.

        Returns:
            What the raw optimizer returned; the loss of the overflowing evaluation where the step was skipped.

        Raises:
            NotScaledError: The closure ran backward outside `scale_loss`.
            ProtocolError: There is no closure, or it did not clear the gradients of its former evaluation.

        Sync: as the optimizer; one a dtype and evaluation beyond.
        """
        self._refuse_static_graphs()
        if closure is None:
            raise ProtocolError(
                "step was called without a closure on LBFGS, which evaluates the loss several times in a step; "
                "accepted: opt.step(closure). Pass a function that clears the gradients, runs backward inside "
                "scale_loss and returns the loss."
            )
        if not self.ampx_member.group.enabled:
            self.ampx_member.note_result(UNCHECKED)
            return self.optimizer.step(closure)
        cast = paddle.amp.is_autocast_enabled()
        losses: list[Any] = []
        finite: dict[int, bool] = {}

        def evaluate() -> Any:
            # The raw optimizer runs with casting off; the user's closure runs as the user called step.
            with casting.region(self._plan, True) if cast and self._plan is not None else nullcontext():
                loss = closure()
            losses.append(loss)
            for loss_id, is_finite in self._evaluated().items():
                finite[loss_id] = is_finite and finite.get(loss_id, True)
            if not all(finite.values()):
                raise _Overflow
            if self.ampx_member.stage == "unscaled":
                self.ampx_member.begin_change()  # the optimizer uses these gradients, once
            if isinstance(loss, paddle.Tensor) and loss.dtype in casting.LOW:
                return loss.astype("float32")  # LBFGS makes its curvature in the dtype of the loss
            return loss

        before = _Snapshot(self.optimizer)
        try:
            with casting.off() if cast else nullcontext():
                result = self._run(evaluate, losses)
            if not all(finite.values()):
                before.restore()
        except BaseException:
            before.restore()
            self.drop_pending()
            raise
        if finite:
            self._close(finite)
        else:
            self.drop_pending()
        return result

    def _run(self, evaluate: Callable[[], Any], losses: list[Any]) -> Any:
        try:
            return self.optimizer.step(evaluate)
        except _Overflow:
            return losses[-1]

    def _evaluated(self) -> dict[int, bool]:
        """Collect, unscale, check and clip the gradients of one evaluation; return by loss id which are finite."""
        gradients = self._collect(None)
        if not gradients and self.ampx_member.stage == "idle":
            return {}
        self.ampx_member.check_step()
        unscaled = self._unscale(gradients) if self._pending.unscaled is None else self._look_again()
        gradients, finite = self._check(unscaled)
        if all(finite.values()):
            self._clip(gradients)
        self._mixer.reset()
        return finite


class _Snapshot:
    """Parameters and state of LBFGS before a step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._weights = [(parameter, parameter.detach().clone()) for parameter in optimizer._params]
        self._state = {name: _copy(value) for name, value in optimizer.state.items()}

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
