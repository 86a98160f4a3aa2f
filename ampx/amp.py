"""One framework's session: what `ampx.init` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import sessions
from .backend import Backend
from .casting import Casting
from .checks import check_bound, check_clipping, one_wrapped_optimizer, wrapped_optimizers
from .contract import CastPlan
from .effective import Effective
from .errors import AlreadyWrappedError, InvalidOptionError, NotAnOptimizerError, ProtocolError
from .events import Listener
from .group import ScaleGroup
from .levels import Level
from .optimizer import WrappedOptimizer
from .reporting import Reporting
from .scale_state import LossScale
from .scaling import ScaleLoss

if TYPE_CHECKING:
    from .gating import Gate


class Amp(Casting, Reporting):
    """Holds one framework's policy; every module-level function of ampx is a method of it.

    A context manager: leaving it shuts the session down.

    Attributes:
        recipe: What started it, where that is an old recipe that ampx carries out, such as `"apex.amp"`; for reports.
    """

    recipe: str = ""

    def __init__(
        self,
        backend: Backend,
        plan: CastPlan | None,
        level: Level,
        effective: Effective,
        nan_loss: str,
    ) -> None:
        """Made by `ampx.init`, not by hand."""
        self.backend = backend
        self.effective = effective
        self.plan = plan
        self.level = level
        # Whether calls do anything. Plain attributes, like the two below: every training step reads them.
        self.enabled = effective.enabled
        # The plan for regions and functions; None where nothing is cast.
        self.casting = plan if effective.enabled else None
        # Whether a loss is tested for NaN: yes, no, or (None) where that is free.
        self.check_nan: bool | None = {"auto": None, "raise": True, "skip": False}[nan_loss]
        self._groups: list[tuple[ScaleGroup, list[weakref.ref[Any]]]] = []
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listeners: list[list[Listener]] = []
        self._wrapped_values = 0
        self.wrapped_optimizers = 0  # at least so many may be reached by a backward
        self._observed = {}
        self._active = True
        # Losses that came out of scale_loss, by id; an entry goes with its object.
        self.scaled: dict[int, Callable[[], Any]] = {}

    @property
    def framework(self) -> str:
        """Name of the framework."""
        return self.backend.name

    # -- optimizers --------------------------------------------------------------------------------

    def wrap_optimizer(
        self,
        opt: Any,
        *,
        loss_scale: object = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        **options: Any,
    ) -> Any:
        """Give an optimizer that unscales, checks, skips and keeps its own loss scale.

        Args:
            opt: An optimizer of the framework, or a list of them: a list shares one loss scale.
            loss_scale: As in `init`; None for the session's.
            max_grad_norm: Clip the true gradients to this global L2 norm in every step.
            max_grad_value: Clip every element of the true gradients to ±this value, before the norm.
            **options: What the backend accepts beyond (torch: `process_group`, `device_scale`, `fused`,
                `capturable`; mxnet: `in_place`).

        Returns:
            The wrapped optimizer (or the list): the framework accepts it wherever it accepts the raw one.

        Raises:
            NotAnOptimizerError: It is no optimizer of this framework.
            AlreadyWrappedError: It is wrapped already, or twice in the list.
            LowPrecisionParametersError: It holds float16 or bfloat16 parameters without master weights.
            InvalidOptionError: An option is unknown or has a value that is not accepted.
            UnsupportedByBackendError: The backend does not clip gradients.

        Sync: none.
        """
        self._check_active()
        several = type(opt) in (list, tuple)  # an optimizer may be a named tuple
        optimizers = list(opt) if several else [opt]
        if not optimizers:
            raise NotAnOptimizerError(
                "wrap_optimizer got an empty list; accepted: an optimizer or a list of some. Pass yours."
            )
        for position, one in enumerate(optimizers):
            self._check_raw(one, optimizers[:position])
        for name, bound in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
            check_bound(name, bound)
        if max_grad_norm is not None or max_grad_value is not None:
            check_clipping(self.backend)
        if reserved := options.keys() & {"plan", "level"}:
            raise InvalidOptionError(
                f"wrap_optimizer got {', '.join(sorted(reserved))}, which init decides; accepted: loss_scale, "
                f"max_grad_norm, max_grad_value and what the backend adds. Pass it to ampx.init."
            )
        config = self.effective.loss_scale if loss_scale is None else LossScale.parse(loss_scale)
        settings = {
            "plan": self.plan,
            "level": self.level,
            "max_grad_norm": max_grad_norm,
            "max_grad_value": max_grad_value,
            **options,
        }
        if self.backend.capabilities.state_values:
            return self.wrap_transformation(opt, config, settings)
        group = ScaleGroup(self.framework, config, self.enabled, emit=sessions.emit)
        wrapped: list[WrappedOptimizer] = []
        try:
            for one in optimizers:
                wrapped.append(self.backend.wrap_optimizer(one, group.add_member(), settings))
        except BaseException:  # all or none
            for made in reversed(wrapped):
                made.ampx_unwrap()
            raise
        group.index = len(self.live_groups())
        self._groups.append((group, [weakref.ref(one) for one in wrapped]))
        self.wrapped_optimizers += len(wrapped)
        sessions.note_wrapped(self.framework, wrapped)
        for one in optimizers:
            self._remember(one)
        return wrapped if several else wrapped[0]

    def scale_loss(self, loss: Any, opt: Any, *, loss_id: int = 0) -> ScaleLoss:
        """Give a region that yields the scaled loss, with casting off inside.

        Args:
            loss: Floating scalar tensor of any dtype, or a list, tuple or dict of such (same shape returned).
            opt: The wrapped optimizer whose gradients this backward makes, or a list of them. Optimizers with
                different scales are served by the smallest.
            loss_id: Which of the optimizer's loss scales; every id has its own.

        Returns:
            A context manager yielding the loss in float32 times the loss scale.

        Raises:
            NotWrappedError: `opt` does not come from `wrap_optimizer`.
            LossShapeError, LossDtypeError, DetachedLossError, AlreadyScaledError, NonFiniteLossError: The loss
                is not a scalar, not floating, detached, scaled before, or NaN.
            NestedScaleError: A body for the same optimizer is running.
            ProtocolError: The gradients were unscaled and no step has come since.

        Sync: none, unless `init(nan_loss="raise")` and the loss lives on an accelerator.
        """
        if isinstance(opt, WrappedOptimizer):
            return ScaleLoss(self, loss, (opt,), loss_id)
        if self.backend.capabilities.state_values:
            value = self.find_scale(opt, "scale_loss")
            return ScaleLoss(self, loss, (), loss_id, value.state.scale if value.enabled else None)
        optimizers = wrapped_optimizers(opt, "scale_loss")
        if not optimizers or len({id(one) for one in optimizers}) < len(optimizers):
            passed = "one of them twice" if optimizers else "an empty list"
            raise InvalidOptionError(
                f"scale_loss got {len(optimizers)} optimizers, {passed}; accepted: one or several different ones. "
                f"Pass those whose gradients this backward makes."
            )
        return ScaleLoss(self, loss, optimizers, loss_id)

    def others(self, optimizers: Sequence[WrappedOptimizer]) -> list[WrappedOptimizer]:
        """List the living wrapped optimizers of the framework but these. Sync: none."""
        living = sessions.living_optimizers(self.framework)
        return [one for one in living if not any(one is other for other in optimizers)]

    def unscale(self, opt: Any) -> None:
        """Make the pending gradients of a wrapped optimizer true; idempotent until its next step.

        Raises:
            NotScaledError: No `scale_loss` came since the last step.

        Sync: at most one.
        """
        self.refuse_value(opt, "unscale")
        for one in wrapped_optimizers(opt, "unscale"):
            one.ampx_unscale()

    def clip_grad_norm(self, opt: Any, max_norm: float) -> Any:
        """Unscale if not done, clip the true gradients by their global L2 norm.

        Args:
            opt: The wrapped optimizer.
            max_norm: Largest norm that stays as it is; positive.

        Returns:
            The norm of the true gradients before clipping, as the framework's scalar.

        Raises:
            NotScaledError: No `scale_loss` came since the last step.
            UnsupportedByBackendError: The backend does not clip gradients.

        Sync: at most one.
        """
        check_bound("max_norm", max_norm)
        self.refuse_value(opt, "clip_grad_norm")
        wrapped = one_wrapped_optimizer(opt, "clip_grad_norm")
        check_clipping(self.backend)
        return wrapped.ampx_clip_grad_norm(max_norm)

    def gate(self, scheduler: Any, opt: Any) -> Gate:
        """Return a scheduler, or an average of weights, that moves only when the optimizer's last step was applied.

        Args:
            scheduler: Anything with a method `step`, `update` or `update_parameters`. These do nothing after a
                skipped step, and return whether they did something; all else is the object's.
            opt: The wrapped optimizer, or a list of which all must have been applied. With optimizer state as
                values: a function that gives the present state, or a list of such.

        Raises:
            InvalidOptionError: The object has none of these methods.

        Sync: one per step where the scale lives on the device, else none.
        """
        from .gating import Gate

        return Gate(scheduler, self.last_steps(opt))

    # -- life --------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Become the framework's session and switch process-wide casting on, as `init` does."""
        # The session is known first, and forgotten last: whatever interrupts either, `shutdown` does the rest.
        self._active = True
        sessions.add(self)
        self.wrapped_optimizers = len(sessions.living_optimizers(self.framework))
        self.casting = self.plan if self.enabled else None
        if self.plan is not None and self.enabled and self.effective.process_wide:
            self.backend.activate(self.plan)

    def shutdown(self) -> None:
        """Leave the framework as it was before `init`; repeated calls do nothing.

        Optimizers wrapped here keep their loss scales, but `scale_loss` needs a session of the framework.

        Sync: where the scale lives on the device (events still due are sent).
        """
        if not self._active:
            sessions.remove(self)  # where the first call was interrupted before it did
            return
        try:
            for group in self.live_groups():
                group.ledger.close(group)
        finally:  # a listener may raise; the framework is restored all the same
            self.casting = None
            try:
                if self.plan is not None and self.enabled and self.effective.process_wide:
                    self.backend.deactivate(self.plan)
            except Exception:  # the backend would fail again
                self._forget()
                raise
            self._forget()

    def _forget(self) -> None:
        self._active = False
        sessions.remove(self)

    def __enter__(self) -> Amp:
        """Give the session itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    # -- checks ------------------------------------------------------------------------------------

    def _check_active(self) -> None:
        if not self._active:
            raise ProtocolError(
                f"this session for {self.framework!r} was shut down; accepted: an active session. Call ampx.init again."
            )

    def _check_raw(self, opt: Any, before: Sequence[Any]) -> None:
        known = self.backend.is_wrapped(opt) or any(opt is other for other in before)
        if known or self._is_remembered(opt):
            raise AlreadyWrappedError(
                f"wrap_optimizer got an optimizer ({type(opt).__name__}) that is wrapped already; its gradients would "
                f"be unscaled twice. Use the object that the first call returned."
            )
        if not self.backend.is_optimizer(opt):
            raise NotAnOptimizerError(
                f"wrap_optimizer got {type(opt).__module__}.{type(opt).__qualname__}, which is no optimizer of "
                f"{self.framework!r}; accepted: one of the framework's optimizers or a list of them. Pass that."
            )

    def _is_remembered(self, opt: Any) -> bool:
        try:
            return opt in self._wrapped
        except TypeError:
            return False

    def _remember(self, opt: Any) -> None:
        try:
            self._wrapped.add(opt)
        except TypeError:
            # Values such as named tuples have no identity to remember; wrapping them again is no error.
            return
