"""What `wrap_optimizer` returns: the step, and what every wrapped optimizer offers.

Holds no scale and no stage: they are the protocol's. Knows no framework: the backend computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from . import callers
from .backend import Backend, CastPlan, GenericBackend, Unscaled, leaves
from .errors import (
    AlreadyWrappedError,
    AmpxError,
    AmpxWarning,
    InvalidOptionError,
    NoGradientsWarning,
    NotWrappedError,
    ProtocolError,
    shown,
)
from .events import UNCHECKED, StepResult
from .protocol import Handle, Member, ScaleGroup, refuse_values
from .scale_state import Scalar, is_number


class WrappedOptimizer(Handle):
    """Base of all optimizers that `wrap_optimizer` returns.

    Attributes:
        ampx_member: The optimizer's place in the protocol; for backends.

    Example:
        >>> print(optimizer.loss_scale, optimizer.last_step)
    """

    ampx_member: Member

    @property
    def loss_scale(self) -> float:
        """The current loss scale (of loss id 0); 1 in a disabled session. Sync: where the scale lives on the device."""
        if not self.ampx_enabled:
            return 1.0
        self.ampx_member.group.resolve()
        return float(self.ampx_member.group.states[0].scale)

    @property
    def last_step(self) -> StepResult | None:
        """What the last step did; None before the first. Sync: where the scale lives on the device."""
        member = self.ampx_member
        member.group.resolve()
        result = member.group.unsettled(member) or member.result
        if result is not None and not isinstance(result.grad_norm, (float, type(None))):
            # The norm stays where it was computed until it is read: reading it may sync, stepping may not.
            result = replace(result, grad_norm=float(result.grad_norm))
        return result

    @property
    def meter(self) -> Any:
        """What the last metered update did, one in a hundred, as `ampx.numerics.meter.Meter`; None before, or without.

        Sync: one a device.
        """
        return self.ampx_meter()

    @property
    def ampx_group(self) -> ScaleGroup:
        """The loss scale, which others may share."""
        return self.ampx_member.group

    @property
    def ampx_enabled(self) -> bool:
        """False: transparent."""
        return self.ampx_member.group.enabled

    def ampx_culprits(self) -> tuple[str, ...]:
        """Return the names of the parameters whose gradients are not finite, for `ScaleCollapsed`; () for unknown."""
        return ()

    def __copy__(self) -> NoReturn:
        """Refuse: two wrappers would divide the gradients of one raw optimizer, each by itself."""
        raise AlreadyWrappedError(
            "copy.copy got a wrapped optimizer; the copy would wrap the same raw optimizer a second time. Use the "
            "object itself, or copy.deepcopy of it together with its model: copy.deepcopy((model, opt))."
        )

    def ampx_is_frozen(self) -> bool:
        """Return whether no parameter asks for gradients, so that a step without any is meant; False for unknown."""
        return False

    def ampx_warn_unreached(self, steps: int) -> None:
        """Warn that so many steps in a row found no gradient, although a loss was scaled for each."""
        callers.warn(
            f"{steps} steps in a row found no gradient on any parameter of the optimizer, although each had a loss "
            f"that went through scale_loss: nothing is trained. Either the optimizer was made from another model than "
            f"the one that computes the loss (a copy, or the one that was there before another was loaded), or "
            f"gradients are cleared between backward and step, or backward is not called. Make the optimizer from the "
            f"parameters of the model that trains, and clear gradients after the step. An optimizer that the loss is "
            f"not meant for: leave it out of scale_loss, and do not step it.",
            NoGradientsWarning,
        )

    def ampx_warn_waiting(self, steps: int) -> None:
        """Warn that the loss scale did not move in so many steps, since another that shares it did not step."""
        callers.warn(
            f"the loss scale has waited for {steps} steps for the step of another optimizer that shares it: a loss was "
            f"scaled for that one, too, and its gradients carry the scale. Until it steps, no overflow lowers the "
            f"scale. Step it, clear its gradients by its zero_grad(), or leave it out of scale_loss; optimizers that "
            f"are wrapped one by one have a scale each.",
            AmpxWarning,
        )

    def ampx_meter(self) -> Any:
        """Return what `meter` returns; None where the backend does not meter."""
        return None

    def ampx_unwrap(self) -> None:
        """Leave the raw optimizer as if it had never been wrapped, because another of its list was refused."""

    def ampx_catch_up(self) -> None:
        """Note what compiled code has done to pending gradients since; called before `scale_loss` decides.

        Reading `ampx_member` notes nothing: a question changes nothing.
        """

    def ampx_is_cleared(self) -> bool:
        """Return whether unscaled gradients were cleared by other code, such as `model.zero_grad()`."""
        return False

    def ampx_notice_cleared(self) -> None:
        """Forget unscaled gradients that are cleared."""

    def ampx_check_backward(self, loss_id: int) -> None:
        """Raise where `ampx_before_backward` would; all of a list are asked before one of them is prepared."""

    def ampx_before_backward(self, loss_id: int, scale: Scalar) -> None:
        """Prepare for a `scale_loss` body with a loss scale, or raise; called before its stage is entered."""

    def ampx_after_backward(self, loss_id: int) -> None:
        """Tidy up after a `scale_loss` body that ended without an exception."""

    def ampx_snapshot_gradients(self, scale: Scalar) -> Any:
        """Return a snapshot of the gradients before another optimizer's body, for `ampx_notice_foreign`.

        None where what that body writes does not matter, or the wrapper sees it by other means.
        """
        return None

    def ampx_notice_foreign(self, before: Any, scale: Scalar) -> None:
        """Note gradients that a body of other optimizers has written to since the snapshot `before`."""

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Undo `ampx_before_backward` after a body that raised."""


class PendingGradients:
    """What is known of the gradients that wait for a step, beyond their stage.

    Attributes:
        unscaled: The unscaled gradients and their finiteness (`Unscaled`); None while they carry a scale.
        norm: Their norm before clipping; None where it was not measured.
        brought: The scale that gradients which were there before the first backward were brought to, in its body.
        skipped: The last step was skipped, and its gradients were not cleared by the wrapper.
    """

    __slots__ = ("brought", "norm", "skipped", "unscaled")

    def __init__(self) -> None:
        self.unscaled: Any = None
        self.norm: Any = None
        self.brought: Scalar = None
        self.skipped = False

    def note_norm(self, norm: Any) -> None:
        """Keep the first norm that was measured: later ones are of clipped gradients."""
        if self.norm is None:
            self.norm = norm

    def forget(self) -> None:
        """Forget gradients that were used or cleared."""
        self.unscaled = self.norm = None


_living: weakref.WeakSet[GenericOptimizer] = weakref.WeakSet()  # some may share gradients


class GenericOptimizer(WrappedOptimizer):
    """Delegate to a raw optimizer, stepping it only with unscaled and finite gradients.

    Everything but `step` and `zero_grad` is the raw optimizer's.
    """

    def __init__(self, backend: GenericBackend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        """Wrap; the raw optimizer is not touched."""
        self.ampx_member = member
        member.belong_to(self)
        self._backend = backend
        self._implicit = backend.capabilities.gradients == "implicit"
        self._plan: CastPlan | None = options.get("plan")
        self._max_grad_norm: float | None = options.get("max_grad_norm")
        self._max_grad_value: float | None = options.get("max_grad_value")
        self._pending = PendingGradients()
        self.optimizer = optimizer  # last: from here on, names of the raw optimizer are set on it
        self._live()

    def _live(self) -> None:
        if self._implicit and self.ampx_member.group.enabled:
            _living.add(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the raw optimizer what is its own (`opt.lr = 0.1`), where setting it here would change nothing."""
        own = name.startswith(("_", "ampx_")) or "optimizer" not in self.__dict__ or hasattr(type(self), name)
        if own or name in self.__dict__ or not hasattr(self.optimizer, name):
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, {self.ampx_member.group.config!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy or a pickle."""
        self.__dict__.update(state)
        self.ampx_member.belong_to(self)
        self._live()

    def step(self, grads: Any = None) -> None:
        """Unscale if not done, check, clip, apply or skip, move the loss scale.

        Args:
            grads: The scaled gradients, where the framework's gradients are values.

        Raises:
            NotScaledError: No `scale_loss` came since the last step.
            ProtocolError: The step before raised half-way, so that it may have been applied.
            UnsupportedByBackendError: An argument was passed although gradients hang on the parameters.

        Sync: as the backend's `unscale`.
        """
        member = self.ampx_member
        if member.observers:
            member.begin_step(self)
        grads = self._collect(grads)
        if not member.group.enabled:
            self._apply(self._clip(grads))
            self._pending.forget()
            member.note_result(UNCHECKED)
            return
        empty = _is_empty(grads)
        if not (empty and self._implicit and member.stage == "idle"):
            member.check_step()
        if empty:
            self._close_empty()
            return
        if member.backwards:
            member.check_backward()
        grads, finite = self._check(self._unscale(grads) if self._pending.unscaled is None else self._look_again())
        member.begin_change()  # nobody can tell how far an update came that raised
        if all(finite.values()):
            self._apply(self._clip(grads))
        else:
            self._skip()
        self._close(finite)

    def _collect(self, grads: Any) -> Any:
        """Return the gradients of this step: those on the parameters, or what was passed where they are values."""
        if not self._implicit:
            return grads
        if grads is not None:
            self._backend.refuse("arguments of step (closures)")
        return self._backend.gradients(self.optimizer)

    def _unscale(self, grads: Any) -> Unscaled:
        """Unscale gradients that are not yet, and note it."""
        member = self.ampx_member
        factor = 1.0 if member.stage == "unscaled" else member.factor
        self._check_divided_once(grads, factor)
        member.begin_change()
        try:
            unscaled = self._pending.unscaled = self._backend.unscale(grads, factor)
        except AmpxError:  # a refusal comes before anything is divided
            member.end_change()
            raise
        if self._implicit:  # values that were passed are gone with this step, whatever comes of it
            member.note_unscaled()
        return unscaled

    def _check_divided_once(self, grads: Any, scale: Scalar) -> None:
        """Raise where another optimizer waits for its step with some of these gradients.

        A backend's gradients are a tree to core, which can tell that both hold a leaf, and cannot have a part divided.
        """
        if len(_living) < 2 or self not in _living or scale == 1.0:
            return
        own = {id(leaf) for leaf in leaves(grads) if leaf is not None}
        for other in list(_living):
            waits = other.ampx_member.stage == "scaled" or other._pending.brought is not None
            if other.ampx_member is not self.ampx_member and waits and other._backend is self._backend:
                theirs = self._backend.gradients(other.optimizer)
                if any(id(leaf) in own for leaf in leaves(theirs)):
                    raise ProtocolError(
                        "two wrapped optimizers hold one parameter, and gradients of both carry a loss scale: this "
                        "backend would divide the shared one once for each; accepted: one optimizer that waits for its "
                        "step. Step and clear one before the other's scale_loss, or put all parameters into one "
                        "optimizer."
                    )

    def _look_again(self) -> Unscaled:
        """Test unscaled gradients that hang on parameters once more: they may have been written to since."""
        grads, finite = self._backend.gradients(self.optimizer), bool(self._pending.unscaled.finite)
        unscaled = self._pending.unscaled = Unscaled(grads, finite and self._backend.unscale(grads, 1.0).finite)
        return unscaled

    def _check(self, unscaled: Unscaled) -> tuple[Any, dict[int, bool]]:
        """Return the unscaled gradients, and their finiteness by loss id. Sync: one where that is on the device."""
        grads, flag = unscaled
        finite = bool(flag)
        by_loss = self.ampx_finite_by_loss(finite)
        if not finite and all(by_loss.values()):  # each by itself, but not their sum
            by_loss = dict.fromkeys(by_loss, False)
        return grads, by_loss

    def _clip(self, grads: Any) -> Any:
        """Clip unscaled gradients as `wrap_optimizer` was asked to."""
        if self._max_grad_norm is not None or self._max_grad_value is not None:
            grads, norm = self._backend.clip(grads, self._max_grad_norm, self._max_grad_value)
            self._pending.note_norm(norm)
        return grads

    def _apply(self, grads: Any) -> None:
        """Update with unscaled, finite gradients, casting off: an optimizer that multiplies matrices would be cast."""
        if self._plan is None:
            self._backend.apply(self.optimizer, grads)
        else:
            with self._backend.autocast(self._plan, False):
                self._backend.apply(self.optimizer, grads)

    def _skip(self) -> None:
        """Leave the weights as they are; a framework may have more to do."""
        self._pending.skipped = self._implicit

    def _close(self, finite: dict[int, bool]) -> None:
        """Note the outcome by loss id and move the loss scale; the norm is read by `last_step`, not here."""
        norm = self._pending.norm
        self._pending.forget()
        self.ampx_member.finish(finite, norm)

    def _close_empty(self) -> None:
        """End a step that found no gradients: it counts for nothing."""
        self._pending.forget()
        self.ampx_member.finish_empty()

    def ampx_check_backward(self, loss_id: int) -> None:
        """Raise where gradients that are there before a window cannot be divided, or are those of a skipped step."""
        grads = self._backend.gradients(self.optimizer) if self._implicit and self.ampx_member.stage == "idle" else None
        if _is_empty(grads):
            return
        finite = self._backend.unscale(grads, 1.0).finite
        if self._pending.skipped and not finite:
            raise ProtocolError(
                "scale_loss was called while gradients of a skipped step hang on the parameters; they are not finite, "
                "and what is added to them will not be; accepted: cleared gradients. Call opt.zero_grad() first."
            )

    def ampx_before_backward(self, loss_id: int, scale: Scalar) -> None:
        """Bring gradients that are there before a window to its scale: the step before left them unscaled."""
        if self._implicit and self.ampx_member.stage == "idle":
            if self._pending.skipped:
                self.ampx_check_backward(loss_id)
                self._pending.skipped = False
            self._check_divided_once(self._backend.gradients(self.optimizer), scale)
            self._divide(1.0 / scale)
            self._pending.brought = scale

    def ampx_after_backward(self, loss_id: int) -> None:
        """Keep gradients that were brought to the scale of the body."""
        self._pending.brought = None

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Unscale them again, with those of the body that raised."""
        if self._pending.brought is not None:
            self._divide(self._pending.brought)
            self._pending.brought = None

    def _divide(self, divisor: Scalar) -> None:
        """Divide gradients on the parameters; entering or leaving the body ends the change."""
        grads = self._backend.gradients(self.optimizer)
        if _is_empty(grads):
            return
        member = self.ampx_member
        if member.stage != "changing":
            member.begin_change()
        try:
            self._backend.unscale(grads, divisor)
        except AmpxError:  # a refusal comes before anything is divided
            member.end_change()
            raise

    def ampx_finite_by_loss(self, finite: bool) -> dict[int, bool]:
        """Return which loss ids were finite; a wrapper that keeps several losses apart knows better."""
        return dict.fromkeys(self.ampx_member.factors, finite)

    def zero_grad(self) -> None:
        """Forget the gradients, pending ones included."""
        self.ampx_member.begin_clear()
        if self._implicit:
            self._backend.zero_gradients(self.optimizer)
        self._pending.forget()
        self._pending.skipped = False
        self.ampx_member.end_clear()

    def ampx_unscale(self) -> None:
        """Unscale the pending gradients, in place on the parameters."""
        self._needs_implicit("unscale")
        if self.ampx_member.stage == "unscaled" or not self.ampx_member.group.enabled:
            return
        self.ampx_member.check_step()
        grads = self._backend.gradients(self.optimizer)
        if _is_empty(grads):
            self.ampx_member.note_unscaled()
        else:
            if self.ampx_member.backwards:
                self.ampx_member.check_backward()
            self._unscale(grads)

    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Clip the unscaled gradients."""
        self._needs_implicit("clip_grad_norm")
        self.ampx_unscale()
        member = self.ampx_member
        grads = self._backend.gradients(self.optimizer)  # not those that were unscaled: they may have been replaced
        if _is_empty(grads):
            return self._backend.clip(grads, max_norm, None)[1]
        member.begin_change()
        clipped, norm = self._backend.clip(grads, max_norm, None)
        pending = self._pending
        if pending.unscaled is not None:
            pending.unscaled = Unscaled(clipped, pending.unscaled.finite)
        pending.note_norm(norm)
        member.end_change()
        return norm

    def ampx_is_cleared(self) -> bool:
        """Return whether unscaled gradients were cleared, and not by this wrapper."""
        return self._implicit and _is_empty(self._backend.gradients(self.optimizer))

    def ampx_notice_cleared(self) -> None:
        """Forget them: a step skipped by hand."""
        self.zero_grad()

    def _needs_implicit(self, call: str) -> None:
        if not self._implicit:
            refuse_values(call, self._backend.name, "step")


def _is_empty(grads: Any) -> bool:
    # An array of several elements has no truth value, so only containers are asked.
    return grads is None or (isinstance(grads, (list, tuple, dict)) and not grads)


def wrapped_optimizers(opt: Any, call: str) -> list[WrappedOptimizer]:
    """Return the wrapped optimizers of one argument."""
    optimizers = list(opt) if isinstance(opt, (list, tuple)) else [opt]
    if not optimizers:
        raise InvalidOptionError(
            f"{call} got an empty list of optimizers; accepted: a wrapped optimizer, or several different ones. Pass "
            f"those that the call is for."
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, WrappedOptimizer):
            raise NotWrappedError(
                f"{call} got {type(optimizer).__name__}, which wrap_optimizer did not return; accepted: wrapped "
                f"optimizers. Call opt = ampx.wrap_optimizer(opt) first and pass its result."
            )
    return [optimizer.ampx_member.owner_of(optimizer) for optimizer in optimizers]


def check_bound(name: str, bound: object, optional: bool = True) -> None:
    """Raise unless a bound is a positive number, or None where it is optional."""
    if (bound is None and optional) or (is_number(bound) and bound > 0):
        return
    accepted = "a positive number, or None" if optional else "a positive number"
    raise InvalidOptionError(f"{name}={shown(bound)} is not a bound; accepted: {accepted}. Change it.")


def check_clipping(backend: Backend) -> None:
    """Raise where a backend does not clip gradients."""
    if not backend.capabilities.clipping:
        backend.refuse("gradient clipping (max_grad_norm, max_grad_value, clip_grad_norm)")


class Delegated:
    """A name of a framework's optimizers that is looked up, and set, on the raw one that a wrapper holds."""

    def __init__(self, native: type, holder: str, name: str) -> None:
        self._native, self._holder, self._name = native, holder, name

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the raw optimizer's; asked of the class, the framework's."""
        return getattr(self._native if instance is None else getattr(instance, self._holder), self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(getattr(instance, self._holder), self._name, value)


def delegate(wrapper: type, native: type, holder: str) -> None:
    """Delegate all that a framework's class has to the raw optimizer that a wrapper holds as `holder`.

    Private names are included: modules of frameworks call many of them from outside.
    """
    for name in vars(native):
        if not name.startswith("__"):
            setattr(wrapper, name, Delegated(native, holder, name))
