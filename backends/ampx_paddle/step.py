"""The step of a Paddle optimizer: it delegates to the raw one, which gets unscaled and finite gradients only."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

import paddle

from ampx.backend import CastPlan, GenericBackend, Unscaled
from ampx.errors import LowPrecisionParametersError, ProtocolError, UnsupportedByBackendError
from ampx.optimizer import GenericOptimizer
from ampx.protocol import Member
from ampx.provenance import check_not_shared
from ampx.rooms import make_meter
from ampx.saved_state import refuse_session_state
from ampx.scale_state import FLOAT32_MAX

from . import sharding
from .casting import LOW
from .delegation import DelegatingOptimizer
from .gradients import (
    any_nonzero,
    clip,
    collect,
    gradient_of,
    meter_samples,
    name_nonfinite,
    names_in_models,
    parameters,
    spoil,
    sum_of_squares,
    unscale,
)
from .guard import StepGuard
from .losses_by_id import LossMixer, refuse_unmixable
from .writes import Writes, sharers

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

_WIDE: Final = paddle.float32


def refuse_low_precision(optimizer: Any, plan: CastPlan | None, trained: list[Any]) -> bool:
    """Raise where a raw optimizer holds low-precision parameters without master copies, but at O3; return whether any.

    Args:
        optimizer: The raw optimizer.
        plan: The casting of its session.
        trained: Its `parameters`.

    Raises:
        LowPrecisionParametersError: There are some.
    """
    # Most are float32, and Paddle's dtypes are slow to compare.
    others = [parameter for parameter in trained if parameter.dtype is not _WIDE]
    if not others:
        return False
    names = [parameter.name for parameter in others if parameter.dtype in LOW]
    pure = plan is not None and plan.level == "O3"
    if names and not pure and not getattr(optimizer, "_multi_precision", False):
        raise LowPrecisionParametersError(
            f"the optimizer holds {len(names)} low-precision parameters ({', '.join(names[:5])}); updates smaller than "
            f"their precision would be lost. Keep the parameters in float32, or use ampx.init(level='O2') and "
            f"model, opt = ampx.prepare(model, opt)."
        )
    return bool(names)


class AmpOptimizer(GenericOptimizer, DelegatingOptimizer):
    """A Paddle optimizer with its own loss scale.

    Everything but stepping and clearing is the raw optimizer's; `state_dict` holds nothing of ampx and loads into
    plain Paddle (`amp.state_dict()` holds the loss scale).

    Attributes:
        ampx_member: Its place in the protocol.
    """

    def __init__(self, backend: GenericBackend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        self._mixer = LossMixer(member, optimizer)
        self._writes = Writes(member, optimizer)
        self._guard = StepGuard(member, weakref.WeakMethod(self._writes.are_scaled))
        plan = options["plan"]
        self._meter = make_meter("float32" if plan is None else plan.dtype, meter_samples)
        super().__init__(backend, optimizer, member, options)
        member.observers = (self._meter,)
        member.mixes = False
        if member.group.enabled:
            self._guard.watch(optimizer)
            self._writes.watch()

    def ampx_unwrap(self) -> None:
        """Take the guard off the raw optimizer."""
        self._guard.leave(self.optimizer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is not the wrapper's own, which it has once it holds the raw optimizer, on that one."""
        if name in self.__dict__ or "optimizer" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            if name in ("_parameter_list", "_param_groups"):
                sharding.refuse_partition()
            setattr(self.optimizer, name, value)

    # -- the step --------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale if not done, check, clip, apply or skip, move the loss scale.

        Args:
            closure: A function that clears the gradients, runs backward inside `scale_loss` and returns the loss; it
                runs once, first. (LBFGS evaluates it several times: see `closures`.)

        Returns:
            What the closure returned; None without one.

        Raises:
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.
            ProtocolError: Another loss has added to the gradients with a scale of its own.
            UnsupportedByBackendError: The step is part of a static graph; or `use_multi_tensor` was asked for, and
                other parameters have gradients than at first.

        Sync: one, as Paddle's GradScaler; where nothing is pending, one a gradient.
        """
        self._refuse_static_graphs()
        loss = None
        if closure is not None:
            with paddle.enable_grad():
                loss = closure()
        super().step()  # in core's order: the parts follow
        return loss

    def _refuse_static_graphs(self) -> None:
        if not paddle.in_dynamic_mode():
            self._backend.refuse("step of an eager optimizer in a static graph (wrap it there, and call minimize)")

    def _collect(self, grads: Any = None) -> list[Any]:
        """Return the parameters that have a gradient; none where all are the zeros that `clear_grad` leaves."""
        member = self.ampx_member
        gradients = collect(self.optimizer)
        if member.group.enabled:
            if member.stage == "idle":
                return gradients if any_nonzero(gradients) else []
            _check_multi_tensor(self.optimizer, len(gradients))
        return gradients

    def _unscale(self, grads: Any) -> Unscaled:
        """Unscale gradients and test them; their norm, where it is bounded, is read with their finiteness."""
        self._writes.bring_together()
        scale = self._writes.carried
        others = sharers(self._writes.provenance, grads)  # Paddle's kernel would divide the gradients once for each
        changing = [(self._writes, []), *others]
        for writes, _ in changing:
            writes.member.begin_change()
        try:
            finding = unscale(grads, scale)
        except UnsupportedByBackendError:  # a refusal comes before anything is divided
            for writes, _ in changing:
                writes.member.end_change()
            raise
        for other, shared in others:
            spoil(shared, finding)
            other.provenance.note(shared, 1.0, stays=True)
            other.member.end_change()
        self._writes.note_unscaled()
        if self._max_grad_norm is not None:
            finding = finding.combine(self._squares(grads))
        unscaled = self._pending.unscaled = Unscaled(grads, finding)
        self.ampx_member.note_unscaled()
        return unscaled

    def _look_again(self) -> Unscaled:
        """Test unscaled gradients once more: they may have been written to, or the sum of losses overflows."""
        self._writes.bring_together()
        gradients = collect(self.optimizer)
        finite = unscale(gradients, 1.0).combine(self._squares(gradients), self._pending.unscaled.finite)
        unscaled = self._pending.unscaled = Unscaled(gradients, finite)
        return unscaled

    def _squares(self, gradients: list[Any]) -> Any:
        return None if self._max_grad_norm is None else sum_of_squares(gradients, self._max_grad_value)

    def _clip(self, grads: list[Any]) -> list[Any]:
        """Clip as `wrap_optimizer` was asked to; the norm was read already where it was tested."""
        if self._max_grad_norm is not None or self._max_grad_value is not None:
            unscaled = self._pending.unscaled
            squares = None if unscaled is None else unscaled.finite.squares
            self._pending.note_norm(clip(grads, self._max_grad_norm, self._max_grad_value, squares))
        return grads

    def _apply(self, grads: Any) -> None:
        """Update with casting off, telling the guard that it is the wrapper who steps."""
        with self._guard.opened(self.optimizer):
            self._backend.apply(self.optimizer, grads)

    def _close(self, finite: dict[int, bool]) -> None:
        """Note what the gradients carry now, and move the loss scale."""
        self._writes.note_step(all(finite.values()))
        super()._close(finite)
        self._mixer.reset()

    def _close_empty(self) -> None:
        super()._close_empty()
        self._mixer.reset()

    def minimize(
        self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[None, list[tuple[Any, Any]]]:
        """Step, as Paddle's `minimize` does in eager mode after `backward`.

        Args:
            loss: Not looked at: backward ran inside `scale_loss`.
            startup_program: Not looked at in eager mode.
            parameters: Refused, because the optimizer's own parameters were checked.
            no_grad_set: Refused, likewise.

        Returns:
            None, and the pairs of parameters and gradients.

        Raises:
            UnsupportedByBackendError: `parameters` or `no_grad_set` was passed.

        Sync: as `step`.
        """
        if parameters is not None or no_grad_set is not None:
            self._backend.refuse("parameters and no_grad_set of minimize")
        self.step()
        return None, [(parameter, gradient_of(parameter)) for parameter in collect(self.optimizer)]

    def _apply_optimize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: Paddle's sharding updates by this, without a step that checks the gradients."""
        sharding.refuse("fleet asked for an update without a step")

    # -- clearing --------------------------------------------------------------------------------------

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget all gradients, pending ones included; Paddle leaves zeros unless told otherwise."""
        member = self.ampx_member
        inside = member.stage == "inside"
        member.begin_clear()
        self.optimizer.clear_grad(set_to_zero)
        self._writes.note_cleared(inside)
        self._pending.forget()
        if inside:
            self._mixer.drop_aside()
        else:
            self._mixer.reset()
        member.end_clear()

    clear_gradients = clear_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, pending ones included."""
        self.clear_grad(set_to_zero=not set_to_none)

    def drop_pending(self) -> None:
        """Forget pending gradients without counting a step."""
        self.ampx_member.begin_clear()
        self._pending.forget()
        self._mixer.reset()
        self.ampx_member.end_clear()

    def note_rescaled(self, factor: float) -> None:
        """Note that pending gradients were brought to another scale."""
        self._writes.note_brought(factor)
        self.ampx_member.note_scaled(factor)

    def are_unknown(self) -> bool:
        """Return whether a skipped step left gradients that were not cleared. Sync: one a gradient, where it did."""
        return self.ampx_member.stage == "idle" and self._writes.are_unknown()

    # -- what core asks --------------------------------------------------------------------------------

    def ampx_is_frozen(self) -> bool:
        """Return whether no parameter asks for gradients."""
        return not parameters(self.optimizer)

    def ampx_is_cleared(self) -> bool:
        """Return whether model.clear_gradients() dropped unscaled gradients. Sync: one a gradient."""
        return not any_nonzero(collect(self.optimizer))

    def ampx_notice_cleared(self) -> None:
        """Forget them: a step skipped by hand."""
        self.clear_grad()

    def ampx_check_backward(self, loss_id: int) -> None:
        """Raise where others wrote to gradients, or those of several loss ids cannot be kept apart.

        Sync: with a second loss id, and where a step was skipped, one a gradient.
        """
        self._check_parameters()
        self._writes.check()
        if self._mixer.mixes(loss_id) and any_nonzero(collect(self.optimizer)):
            refuse_unmixable(self.optimizer)
            sharing = sharers(self._writes.provenance, parameters(self.optimizer))
            check_not_shared(loss_id, (other.member for other, _ in sharing))

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Bring what is there to this scale, and put gradients of other loss ids aside.

        Sync: with a second loss id, one a gradient.
        """
        self._check_parameters()
        idle = self.ampx_member.stage == "idle"
        if idle:
            self._mixer.reset()  # an exception may have left them
        self._writes.bring_together(scale if idle else None)
        if self._mixer.mixes(loss_id):
            self._mixer.begin(loss_id, self._unscale_first)
        self._writes.enter(scale)

    def _check_parameters(self) -> None:
        """Raise where parameters have low precision that they should not have, or lack it."""
        plan = self._plan
        lowered = refuse_low_precision(self.optimizer, plan, parameters(self.optimizer))
        if plan is not None and plan.level in ("O2", "O3") and not lowered:
            raise ProtocolError(
                "the level asks for low-precision parameters, but the optimizer holds none: the model would train in "
                "float32. Call model, opt = ampx.prepare(model, opt) first, or use level='O1'."
            )

    def _unscale_first(self) -> bool:
        self.ampx_unscale()
        unscaled = self._pending.unscaled
        return unscaled is None or bool(unscaled.finite)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Unscale the new gradients and add those put aside, where there are several losses. Sync: one a dtype."""
        self._writes.leave()
        if self._mixer.loss_id is not None:
            try:
                refuse_unmixable(self.optimizer)
            except UnsupportedByBackendError:
                self.drop_pending()
                raise
            self._pending.unscaled = self._mixer.end(loss_id)
            self.ampx_member.note_unscaled()

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Drop what an unfinished backward left, where there are several losses, and bring back what was put aside."""
        self._writes.leave(unfinished=self._mixer.loss_id is None)
        if self._mixer.loss_id is not None:
            self._mixer.abandon()

    def ampx_finite_by_loss(self, finite: bool) -> dict[int, bool]:
        """Return which losses were finite."""
        return dict(self._mixer.finite) or dict.fromkeys(self.ampx_member.factors, finite)

    def ampx_unscale(self) -> None:
        """Unscale the pending gradients."""
        if self.ampx_member.group.enabled and self.ampx_member.stage == "unscaled":
            self._writes.bring_together()
        super().ampx_unscale()

    def ampx_clip_grad_norm(self, max_norm: float) -> paddle.Tensor:
        """Clip the unscaled gradients; the norm before is float64 where float32 does not reach. Sync: one."""
        norm = super().ampx_clip_grad_norm(max_norm)
        return paddle.to_tensor(norm, "float64" if norm > FLOAT32_MAX else "float32")

    def ampx_meter(self) -> Meter | None:
        """Return what the last update that was looked at did."""
        return self._meter.last(lambda: names_in_models(parameters(self.optimizer)))

    def ampx_culprits(self) -> tuple[str, ...]:
        """Return the names of the parameters whose gradients are not finite. Sync: one a gradient."""
        return tuple(name for name, _, _ in name_nonfinite(self.optimizer, None))

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the raw optimizer's state; the loss scale stays. Paddle skips what it does not know without a word.

        Raises:
            InvalidStateError: It is the state of a session.
        """
        refuse_session_state(state_dict, "set_state_dict")
        self.optimizer.set_state_dict(state_dict)

    load_state_dict = set_state_dict

    # -- copies: what Paddle's own optimizers can ------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy optimizer and loss scale; parameters travel along, gradients do not.

        Raises:
            UnsupportedByBackendError: The optimizer has stepped: Paddle's own cannot be copied then.
        """
        try:
            raw = copy.deepcopy(self.optimizer, memo)
        except TypeError as error:
            raise UnsupportedByBackendError(
                f"copy.deepcopy got a wrapped {type(self.optimizer).__name__} that has stepped, which Paddle cannot "
                f"copy ({error}); accepted: one that has not. Make a new optimizer, wrap it, and load opt.state_dict() "
                f"into it and amp.state_dict() into the session."
            ) from error
        options = {"plan": self._plan, "max_grad_norm": self._max_grad_norm, "max_grad_value": self._max_grad_value}
        backend: Any = self._backend
        new = memo[id(self)] = type(self)(backend, raw, copy.deepcopy(self.ampx_member, memo), options)
        new.ampx_member.end_clear()
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled, because Paddle's own optimizers cannot be."""
        raise UnsupportedByBackendError(
            f"a wrapped {type(self.optimizer).__name__} cannot be pickled, because Paddle's optimizers cannot; "
            f"accepted: their states. Save opt.state_dict() with paddle.save, and amp.state_dict() as JSON."
        )

    def __repr__(self) -> str:
        """Show the raw optimizer's class and the loss scale's configuration."""
        return f"AmpOptimizer({type(self.optimizer).__name__}, {self.ampx_member.group.config!r})"


def _check_multi_tensor(optimizer: Any, present: int) -> None:
    """Raise where Paddle would update several parameters at once, and not all of them have a gradient as at first.

    Paddle would raise half-way.
    """
    if not optimizer._use_multi_tensor:
        return
    first = sum(len(group) for groups in optimizer._param_dict.values() for group in groups)
    if first and first != present:
        raise UnsupportedByBackendError(
            f"{type(optimizer).__name__} was made with use_multi_tensor=True and has {present} gradients to step with, "
            f"where its first step had {first}; Paddle takes the same ones every time; accepted: "
            f"use_multi_tensor=False. Make the optimizer without it."
        )
