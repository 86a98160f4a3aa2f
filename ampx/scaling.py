"""The region behind `scale_loss`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from .backend import Backend, CastPlan, Loss
from .errors import (
    AlreadyScaledError,
    DetachedLossError,
    InvalidOptionError,
    LossDtypeError,
    LossShapeError,
    NonFiniteLossError,
    NotEnteredError,
    ProtocolError,
    UnsupportedByBackendError,
    shown,
)
from .optimizer import WrappedOptimizer
from .protocol import Member, Region
from .scale_state import Scalar

_REMEMBERED = 64
_ENTERED = object()  # stands in for a loss that was scaled already
_MEMBER = attrgetter("ampx_member")
_ENABLED = attrgetter("group.enabled")
_SEES_BACKWARD = attrgetter("sees_backward")


class Session(Protocol):
    """What a region asks of its session, which is `Amp`."""

    backend: Backend
    enabled: bool
    casting: CastPlan | None
    check_nan: bool | None
    scaled: dict[int, Callable[[], Any]]
    wrapped_optimizers: int

    def others(self, optimizers: Sequence[WrappedOptimizer]) -> list[WrappedOptimizer]:
        """List the living wrapped optimizers of the session but these."""

    def restore_casting(self) -> None:
        """Switch casting once more as it is now, after a region in which the session ended."""


LossT = TypeVar("LossT")


class ScaleLoss(Generic[LossT]):
    """Yields the scaled loss; casting is off inside. Entered once."""

    # Made in every training step: no instance dictionary, and no work that a plain tensor does not need.
    __slots__ = ("_amp", "_casting", "_entered", "_loss", "_loss_id", "_optimizers", "_scale", "_watched")

    def __init__(
        self, amp: Session, loss: LossT, optimizers: Sequence[WrappedOptimizer], loss_id: int, scale: Scalar = None
    ) -> None:
        """Made by `Amp.scale_loss`; `scale` is given where it comes from a state and not from optimizers."""
        self._scale = scale
        self._amp = amp
        self._loss: Any = loss
        self._optimizers = optimizers
        self._loss_id = loss_id
        self._casting: AbstractContextManager[Any] | None = None
        # Members whose bodies run; they are left one by one.
        self._entered: list[tuple[WrappedOptimizer, Member, Region]] = []
        # Other optimizers, which the backward may reach without being asked to.
        self._watched: Sequence[tuple[WrappedOptimizer, Any]] = ()

    def __enter__(self) -> LossT:
        """Check everything, then scale; a call that raises changes nothing."""
        amp, loss_id, optimizers = self._amp, self._loss_id, self._optimizers
        loss: LossT = self._loss
        if loss is _ENTERED:
            raise ProtocolError(
                "a scale_loss region was entered a second time; accepted: once, for one backward. Call scale_loss "
                "again with the next loss."
            )
        members: list[Member] = [*map(_MEMBER, optimizers)]
        off = not optimizers and self._scale is None  # the state comes from a disabled session
        if off or not amp.enabled or not all(map(_ENABLED, members)):
            self._check_nothing_scaled(members)
            self._optimizers = ()
            return loss
        if loss_id != 0 or type(loss_id) is not int:
            self._check_loss_id()
        cleared: list[WrappedOptimizer] = []
        for optimizer, member in zip(optimizers, members, strict=True):
            if member.stage == "idle":
                continue
            optimizer.ampx_catch_up()
            if member.stage == "unscaled" and optimizer.ampx_is_cleared():
                cleared.append(optimizer)
            else:
                member.check_enter()
        if isinstance(loss, (list, tuple, dict)):
            _check_not_empty(loss)
            _each(loss, self._check_loss)
        elif id(loss) in amp.scaled:
            self._check_loss(loss)
        else:
            check_loss(amp.backend, loss, amp.check_nan)
        if len(optimizers) > 1:
            self._check_together(
                [optimizer for optimizer in optimizers if all(optimizer is not other for other in cleared)]
            )
        for optimizer in cleared:
            optimizer.ampx_notice_cleared()
        return self._begin(loss, members, self._choose_scale())

    def _begin(self, loss: LossT, members: Sequence[Member], scale: Scalar) -> LossT:
        """Prepare the optimizers, switch casting off, scale, and note that the body runs: all of it, or nothing."""
        amp, loss_id, optimizers = self._amp, self._loss_id, self._optimizers
        prepared = 0
        try:
            for optimizer in optimizers:
                optimizer.ampx_before_backward(loss_id, scale)
                prepared += 1
            if amp.wrapped_optimizers > len(optimizers):
                self._scale = scale
                self._watched = [
                    (optimizer, before)
                    for optimizer in amp.others(optimizers)
                    if (before := optimizer.ampx_snapshot_gradients(scale)) is not None
                ]
            plan = amp.casting
            if plan is not None:
                casting = amp.backend.autocast(plan, False)
                casting.__enter__()
                self._casting = casting
            held = members[0].held if members else []
            held.clear()  # while gradients accumulate, at most one graph is kept alive
            scaled: LossT
            if isinstance(loss, (list, tuple, dict)):
                scaled = _each(loss, lambda leaf: _mark(amp.scaled, amp.backend.scale(leaf, scale), held))
            else:
                scaled = _mark(amp.scaled, amp.backend.scale(loss, scale), held)
            if not all(map(_SEES_BACKWARD, members)):
                self._watch_backward(members, scaled)
            self._loss = _ENTERED  # the region must not keep the graph alive
            for optimizer, member in zip(optimizers, members, strict=True):
                self._entered.append((optimizer, member, member.enter(scale, loss_id)))
            return scaled
        except BaseException as error:
            self._undo(optimizers[:prepared], error)
            raise

    def _undo(self, prepared: Sequence[WrappedOptimizer], error: BaseException) -> None:
        """Undo what `_begin` did, for optimizers that it prepared, before an exception."""
        for _, member, region in self._entered:
            member.leave(region, False)
        if self._casting is not None:
            self._casting.__exit__(type(error), error, error.__traceback__)
        for optimizer in prepared:
            optimizer.ampx_abandon_backward(self._loss_id)
            optimizer.ampx_member.end_change()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore casting; note the pending gradients, or after an exception leave the protocol as it was."""
        completed = kind is None
        try:
            if self._casting is not None:
                self._casting.__exit__(kind, error, trace)
                if self._amp.casting is None:
                    self._amp.restore_casting()
        finally:
            for optimizer, member, region in self._entered:
                counts = member.leave(region, completed)
                if counts:
                    optimizer.ampx_after_backward(self._loss_id)
                elif counts is not None:
                    optimizer.ampx_abandon_backward(self._loss_id)
                member.end_change()
            for other, before in self._watched:
                other.ampx_notice_foreign(before, self._scale)

    if not TYPE_CHECKING:  # a type checker finds the mistake by itself, where it does not see this

        def __getattr__(self, name: str) -> NoReturn:
            """Raise for what a loss has and a region has not: `backward`, mostly."""
            raise NotEnteredError(
                f"scale_loss was used without with: .{name} was asked of the region, and only its block has the "
                f"scaled loss; accepted: `with ampx.scale_loss(loss, opt) as scaled: scaled.backward()`, or what the "
                f"framework has in place of backward. Write it so."
            )

    def _watch_backward(self, members: Sequence[Member], scaled: Any) -> None:
        """Have the backend see on which loss the script calls backward, where it can."""
        backend = self._amp.backend
        if not backend.capabilities.sees_backward:
            return
        losses: list[Any] = []
        products: list[Any] = []
        _each(self._loss, losses.append)
        _each(scaled, products.append)
        watched = [backend.watch_backward(loss, product) for loss, product in zip(losses, products, strict=True)]
        for member in members:
            member.watch_backward(watched)

    def _choose_scale(self) -> Scalar:
        """Return the scale that pending gradients carry, or else the smallest current one."""
        loss_id = self._loss_id
        if not self._optimizers:
            return self._scale
        if len(self._optimizers) == 1:
            member = self._optimizers[0].ampx_member
            pending = member.factors.get(loss_id)
            return member.group.ledger.factor(member.group, loss_id) if pending is None else pending
        members = [optimizer.ampx_member for optimizer in self._optimizers]
        for member in members:
            if loss_id in member.factors:
                return member.factors[loss_id]
        return self._amp.backend.smallest([member.group.ledger.factor(member.group, loss_id) for member in members])

    def _check_together(self, optimizers: Sequence[WrappedOptimizer]) -> None:
        """Raise where one backward cannot add to the gradients of all of these optimizers."""
        loss_id = self._loss_id
        members = [optimizer.ampx_member for optimizer in optimizers]
        frozen = [member.factors[loss_id] for member in members if loss_id in member.factors]
        if any(scale is not frozen[0] and scale != frozen[0] for scale in frozen):
            raise ProtocolError(
                f"scale_loss got optimizers whose pending gradients carry different loss scales ({frozen}); one "
                f"backward cannot add to both. Step them first, or wrap them as one list so that they share a scale."
            )
        for optimizer in optimizers:
            optimizer.ampx_check_backward(loss_id)

    def _check_nothing_scaled(self, members: Sequence[Member]) -> None:
        """Raise where gradients of the loss as it is would be divided by a loss scale."""
        if any(member.pending for member in members):
            raise ProtocolError(
                "scale_loss was called with mixed precision off (enabled=False) while scaled gradients are pending, to "
                "which those of this loss would be added as they are; accepted: once nothing is pending. Call "
                "opt.step() or opt.zero_grad() first."
            )
        if self._scale is not None:
            raise ProtocolError(
                "scale_loss was called with mixed precision off (enabled=False) and the state of an optimizer that was "
                "wrapped with it on, whose update divides by the loss scale; accepted: a state of an optimizer that "
                "this session wrapped. Wrap it again and make its state anew."
            )

    def _check_loss_id(self) -> None:
        loss_id = self._loss_id
        if not isinstance(loss_id, int) or isinstance(loss_id, bool) or not 0 <= loss_id < 2**63:
            raise InvalidOptionError(
                f"loss_id={shown(loss_id)} is not an id; accepted: an integer from 0 to 2**63 - 1. Change it."
            )
        if loss_id and not self._amp.backend.capabilities.per_loss_scales:
            raise UnsupportedByBackendError(
                f"scale_loss got loss_id={loss_id}, and backend {self._amp.backend.name!r} keeps one loss scale for an "
                f"optimizer; accepted: 0. Leave loss_id out: the losses then share the optimizer's loss scale."
            )

    def _check_loss(self, loss: Loss) -> None:
        reference = self._amp.scaled.get(id(loss))
        if reference is not None and reference() is loss:
            raise AlreadyScaledError(
                "scale_loss got a loss that came out of scale_loss; its gradients would be scaled twice. Pass the "
                "loss that your loss function returned."
            )
        check_loss(self._amp.backend, loss, self._amp.check_nan)


def check_loss(backend: Backend, loss: Loss, check_nan: bool | None, call: str = "scale_loss") -> None:
    """Raise for a loss that cannot be scaled or differentiated, and name the call that got it.

    Sync: as `Backend.inspect_loss`.
    """
    info = backend.inspect_loss(loss, check_nan)
    if info.elements != 1 and not (info.elements and backend.capabilities.vector_losses):
        raise LossShapeError(
            f"{call} got a loss of {info.elements} elements; accepted: a scalar. Reduce it first, for instance "
            f"to its mean."
        )
    if not info.floating:
        raise LossDtypeError(
            f"{call} got a loss of dtype {info.dtype}; accepted: a floating dtype. Check what your loss function "
            f"returns."
        )
    if not info.attached:
        raise DetachedLossError(
            f"{call} got a loss that no gradient can flow from (it is detached, or was computed with gradients "
            "off); accepted: a loss computed from the parameters. Remove detach(), item() or no_grad around it."
        )
    if info.nan:
        raise NonFiniteLossError(
            f"{call} got a loss that is NaN before scaling, so no loss scale can help; look at the inputs, the "
            "learning rate, or the first overflowing module with ampx.trace_overflow(model). "
            "ampx.init(nan_loss='skip') treats it as an overflow and skips the step instead."
        )


def _check_not_empty(losses: Any) -> None:
    leaves: list[Any] = []
    _each(losses, leaves.append)
    if not leaves:
        raise LossShapeError(
            f"scale_loss got {losses!r}, which holds no loss; accepted: a scalar, or a list, tuple or dict of scalars. "
            f"Pass what your loss function returned."
        )


def _each(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of a list, tuple or dict, keeping its shape."""
    if isinstance(tree, dict):
        return {key: _each(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_each(value, function) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


class _Held:
    """A scaled loss that cannot be weakly referenced, in something that can."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss


def _mark(scaled: dict[int, Callable[[], Any]], loss: Loss, held: list[_Held]) -> Loss:
    """Remember a scaled loss for as long as it lives; one that cannot be weakly referenced, as long as it is held."""
    try:
        scaled[id(loss)] = weakref.ref(loss)
    except TypeError:
        held.append(_Held(loss))
        reference = weakref.ref(held[-1])
        scaled[id(loss)] = lambda: getattr(reference(), "loss", None)
    if len(scaled) > _REMEMBERED:
        # Sweeping now and then costs less than a callback for every loss. Another thread may add losses, or sweep too.
        for key in [key for key, reference in list(scaled.items()) if reference() is None]:
            scaled.pop(key, None)
    return loss
