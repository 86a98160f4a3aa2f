"""The optimizer that Paddle sees: it delegates to the raw one and steps it only with true, finite gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn

import paddle

from ampx.backend import Unscaled
from ampx.errors import AmpxError, UnsupportedByBackendError
from ampx.events import UNCHECKED
from ampx.optimizer import GenericOptimizer
from ampx.protocol import Member
from ampx.scale_state import FLOAT32_MAX

from . import sharding
from .closures import needs_closure, refuse_missing, step_with_closure
from .copies import CopiesWithCare
from .delegation import DelegatingOptimizer
from .gradients import (
    any_nonzero,
    clip,
    collect,
    gradient_of,
    name_nonfinite,
    parameters,
    sum_of_squares,
    unscale,
)
from .guard import StepGuard
from .losses_by_id import LossMixer, drop_gradients, refuse_unmixable
from .writes import Writes

if TYPE_CHECKING:
    from .backend import PaddleBackend

# What is the wrapper's own; everything else is read and set on the raw optimizer.
_OWN: Final = frozenset(
    (
        *("optimizer", "ampx_member", "_backend", "_plan", "_max_grad_norm", "_max_grad_value", "_unscaled", "_norm"),
        *("_brought", "_mixer", "_guard", "_writes", "__weakref__"),
    )
)


class AmpOptimizer(GenericOptimizer, CopiesWithCare, DelegatingOptimizer):
    """A Paddle optimizer with its own loss scale.

    Everything but stepping and clearing is the raw optimizer's; `state_dict` holds nothing of ampx and loads into
    plain Paddle (`amp.state_dict()` holds the loss scale).

    Attributes:
        ampx_member: Its place in the protocol.
    """

    def __init__(self, backend: PaddleBackend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        """Made by `ampx.wrap_optimizer`."""
        super().__init__(backend, optimizer, member, options)
        self._attach()

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        self._mixer = LossMixer()
        self._writes = Writes(self.ampx_member)
        are_scaled = weakref.WeakMethod(self._are_scaled)
        self._guard = StepGuard(self.ampx_member, lambda: (ask := are_scaled()) is not None and ask())
        self.ampx_member.belong_to(self)
        self.ampx_member.mixes = False
        group = self.ampx_member.group
        if group.enabled:
            self._guard.watch(self.optimizer)
            self._writes.watch(parameters(self.optimizer))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the raw optimizer what is not the wrapper's own."""
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            if name in ("_parameter_list", "_param_groups"):
                sharding.refuse_partition()
            setattr(self.optimizer, name, value)

    def _apply_optimize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: Paddle's sharding updates by this, without a step that checks the gradients."""
        sharding.refuse("fleet asked for an update without a step")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Unscale if not done, check, apply or skip, move the loss scale.

        Args:
            closure: A function that clears the gradients, runs backward inside `scale_loss` and returns the loss.
                LBFGS needs one, evaluates it several times, and is put back as it was when an evaluation overflows;
                for the others it runs once, first.

        Returns:
            What the closure returned first; None without one.

        Raises:
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.
            ProtocolError: LBFGS was stepped without a closure, or another loss has added to the gradients with a scale
                of its own.
            UnsupportedByBackendError: The step is part of a static graph; or `use_multi_tensor` was asked for, and
                other parameters have gradients than at first.

        Sync: one, as Paddle's GradScaler; where nothing is pending, one a gradient.
        """
        member = self.ampx_member
        if not paddle.in_dynamic_mode():
            self._backend.refuse("step of an eager optimizer in a static graph (wrap it there, and call minimize)")
        if needs_closure(self.optimizer):
            if closure is None:
                refuse_missing("step")
            elif member.group.enabled:
                return step_with_closure(self, closure)
            else:
                member.note_result(UNCHECKED)
                return self.optimizer.step(closure)
        loss = None
        if closure is not None:
            with paddle.enable_grad():
                loss = closure()
        if member.group.enabled and member.stage == "idle":
            found = collect(self.optimizer)
            if found and not any_nonzero(found):
                # `clear_grad` leaves zeros by default: nothing was computed since, so there is nothing to count.
                self._close_empty()
                return loss
        if not (member.group.enabled and member.pending):
            super().step()
            return loss
        member.check_step()
        self._writes.check()
        _check_multi_tensor(self.optimizer)
        before = self._writes.begin_step()
        try:
            super().step()
        except AmpxError:  # a refusal comes before anything is changed
            self._writes.undo_step(before)
            raise
        self._forget_losses()
        return loss

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
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.
            UnsupportedByBackendError: `parameters` or `no_grad_set` was passed.
            ProtocolError: The raw optimizer is LBFGS, which needs a closure.

        Sync: as `step`.
        """
        if parameters is not None or no_grad_set is not None:
            self._backend.refuse("parameters and no_grad_set of minimize")
        self.step()
        return None, [(parameter, gradient_of(parameter)) for parameter in collect(self.optimizer)]

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget all gradients, pending ones included; Paddle leaves zeros unless told otherwise."""
        member = self.ampx_member
        inside = member.stage == "inside"
        self._begin_drop()
        self.optimizer.clear_grad(set_to_zero)
        self._writes.note_cleared(inside)
        self._unscaled = self._norm = None
        if inside:
            self._mixer.drop_aside()
        else:
            self._forget_losses()
        if member.stage != "idle":
            member.forget()

    clear_gradients = clear_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, pending ones included."""
        self.clear_grad(set_to_zero=not set_to_none)

    # -- what core asks ------------------------------------------------------------------------------

    def ampx_notice_cleared(self) -> None:
        """Forget true gradients that model.clear_gradients() dropped: a step skipped by hand. Sync: one a gradient."""
        if not any_nonzero(collect(self.optimizer)):
            self.clear_grad()

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Bring what is there to this scale, and put gradients of other loss ids aside.

        Raises:
            ProtocolError: Gradients are there of which nobody can tell the scale.

        Sync: with a second loss id, one a gradient.
        """
        if self.ampx_member.stage == "idle":
            self._forget_losses()  # an exception may have left them
            self._writes.take_up(collect(self.optimizer), scale)
        else:
            self._writes.check()
        self._put_aside(loss_id)
        self._writes.enter(scale)

    def _put_aside(self, loss_id: int) -> None:
        member = self.ampx_member
        if self._mixer.loss_id is None:
            if not member.factors or loss_id in member.factors:
                return
            if not any_nonzero(collect(self.optimizer)):  # cleared behind the wrapper's back, by the model say
                member.drop_factors()
                return
            refuse_unmixable(self.optimizer)
            first = next(iter(member.factors))
            self.ampx_unscale()
            self._mixer.note(first, self._unscaled is None or bool(self._unscaled.finite))
        else:
            refuse_unmixable(self.optimizer)
        member.begin_change()  # which ends with the body: until then gradients are missing
        member.mixes = True
        self._mixer.put_aside(self.optimizer, loss_id)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Make the new gradients true and add those put aside, where there are several losses. Sync: one a dtype."""
        self._writes.leave()
        mixer, member = self._mixer, self.ampx_member
        if mixer.loss_id is None:
            return
        try:
            refuse_unmixable(self.optimizer)
        except UnsupportedByBackendError:
            self.drop_pending()
            raise
        found = collect(self.optimizer)
        mixer.note(loss_id, bool(self._backend.unscale(found, member.factors[loss_id]).finite))
        mixer.bring_back()
        self._unscaled = Unscaled(collect(self.optimizer), all(mixer.finite.values()))
        member.note_unscaled()

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Drop what an unfinished backward left, and bring back what was put aside."""
        self._writes.leave(unfinished=self._mixer.loss_id is None)
        if self._mixer.loss_id is not None:
            drop_gradients(self.optimizer)
            self._mixer.bring_back()

    def ampx_finite_by_loss(self, finite: bool) -> dict[int, bool]:
        """Return which losses were finite."""
        if self._mixer.loss_id is None:
            return super().ampx_finite_by_loss(finite)
        return dict(self._mixer.finite)

    def ampx_unscale(self) -> None:
        """Make the pending gradients true.

        Raises:
            ProtocolError: Another loss has added to them with a scale of its own.
        """
        before = self.ampx_member.stage
        if self.ampx_member.group.enabled and before in ("scaled", "unscaled"):
            self._writes.check()
        super().ampx_unscale()
        if before == "scaled":
            self._writes.note_unscaled()

    def ampx_clip_grad_norm(self, max_norm: float) -> paddle.Tensor:
        """Clip the true gradients; the norm before is float64 where float32 does not reach. Sync: one."""
        norm = super().ampx_clip_grad_norm(max_norm)
        return paddle.to_tensor(norm, "float64" if norm > FLOAT32_MAX else "float32")

    def _unscale(self, grads: Any) -> Unscaled:
        """Make gradients true; their norm, where it is bounded, is read with their finiteness."""
        finite = super()._unscale(grads).finite
        unscaled = self._unscaled = Unscaled(grads, finite.combine(self._squares(grads)))
        return unscaled

    def _look_again(self) -> None:
        """Test true gradients once more: somebody may have written to them, or the sum of losses overflows."""
        found = collect(self.optimizer)
        before = True if self._unscaled is None else self._unscaled.finite
        self._unscaled = Unscaled(found, unscale(found, 1.0).combine(self._squares(found), before))

    def _squares(self, found: list[Any]) -> Any:
        return None if self._max_grad_norm is None else sum_of_squares(found, self._max_grad_value)

    def ampx_unwrap(self) -> None:
        """Take the guard off the raw optimizer."""
        self._guard.leave(self.optimizer)

    # -- what closures ask ---------------------------------------------------------------------------

    def casting_region(self, enabled: bool) -> AbstractContextManager[Any]:
        """Return a region with casting as the session's plan says, or off."""
        return nullcontext() if self._plan is None else self._backend.autocast(self._plan, enabled)

    def check_evaluation(self) -> dict[int, bool]:
        """Make the gradients of one evaluation true and clip them; give their finiteness by loss id.

        Raises:
            NotScaledError: There are gradients whose loss did not go through `scale_loss`.
            ProtocolError: The gradients of the evaluation before, or of an interrupted call, were not cleared.

        Sync: one a dtype.
        """
        found = collect(self.optimizer)
        if self.ampx_member.stage == "idle":
            if any_nonzero(found):
                self.ampx_member.check_step()
            return {}
        self.ampx_member.check_step()
        self._writes.check()
        if self._unscaled is None:
            self.ampx_unscale()
        else:
            self._look_again()
        finite = self.ampx_finite_by_loss(self._unscaled is None or bool(self._unscaled.finite))
        if all(finite.values()):
            self._clip(found)
        self._forget_losses()
        return finite

    def _clip(self, found: list[Any]) -> list[Any]:
        """Clip true, finite gradients as asked; their norm was read already where it was tested."""
        if self._max_grad_norm is None and self._max_grad_value is None:
            return found
        squares = None if self._unscaled is None else self._unscaled.finite.squares
        norm = clip(found, self._max_grad_norm, self._max_grad_value, squares)
        self._norm = norm if self._norm is None else self._norm
        return found

    def close_step(self, finite: dict[int, bool]) -> None:
        """Note a step's outcome and move the loss scale."""
        norm = self._norm
        self._unscaled = self._norm = None
        self._writes.note_step(all(finite.values()))
        self.ampx_member.finish(finite, norm)

    def _begin_drop(self) -> None:
        if self.ampx_member.stage not in ("idle", "inside"):
            self.ampx_member.begin_change()

    def drop_pending(self) -> None:
        """Forget pending gradients without counting a step."""
        self._begin_drop()
        self._unscaled = self._norm = None
        self._forget_losses()
        if self.ampx_member.stage != "idle":
            self.ampx_member.forget()

    def _forget_losses(self) -> None:
        self._mixer.reset()
        self.ampx_member.mixes = False

    def _apply(self, grads: Any) -> None:
        """Update, telling the guard that it is the wrapper who steps."""
        self._guard.watch(self.optimizer)
        with self._guard.opened(), self.casting_region(False):
            self._backend.apply(self.optimizer, grads)
        self._writes.note_step(True)

    def _are_scaled(self) -> bool:
        return self._writes.are_scaled(collect(self.optimizer))

    def ampx_culprits(self) -> tuple[str, ...]:
        """Name the parameters whose gradients are not finite. Sync: one."""
        return tuple(name for name, _, _ in name_nonfinite(self.optimizer, None))

    def ampx_restore(self, state: dict[str, Any]) -> None:
        """Come back from a copy; gradients did not travel, so nothing is pending."""
        self.__dict__.update(state)
        self._unscaled = self._norm = None
        self._attach()
        if self.ampx_member.stage != "idle":
            self.ampx_member.forget()

    def __repr__(self) -> str:
        """Show the raw optimizer's class and the loss scale's configuration."""
        return f"AmpOptimizer({type(self.optimizer).__name__}, {self.ampx_member.group.config!r})"


def _check_multi_tensor(optimizer: Any) -> None:
    """Raise where Paddle would update several parameters at once, and not all of them have a gradient as at first.

    Raises:
        UnsupportedByBackendError: So it is: Paddle would raise half-way.
    """
    if not optimizer._use_multi_tensor:
        return
    first = sum(len(group) for groups in optimizer._param_dict.values() for group in groups)
    present = len(collect(optimizer))
    if first and first != present:
        raise UnsupportedByBackendError(
            f"{type(optimizer).__name__} was made with use_multi_tensor=True and has {present} gradients to step with, "
            f"where its first step had {first}; Paddle takes the same ones every time; accepted: "
            f"use_multi_tensor=False. Make the optimizer without it."
        )
