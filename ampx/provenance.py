"""Provenance of gradients: which carry another loss scale than their optimizer's stage says, or an unknown one.

A stage is that of all gradients of an optimizer: those that hang on the parameters before the first body of a step are
unscaled, pending ones carry their scale. What a skipped step, a body that raised, or the scaled loss of other
optimizers leaves is noted here with the gradient and how often it was written: if neither changed, nobody cleared it.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

from .errors import ProtocolError
from .protocol import Member, NotCopied
from .scale_state import Scalar, is_number

# The scale of a gradient for which it is unknown.
UNKNOWN: Final = None


# What holds a gradient (a parameter, mostly), the gradient or None, and how often that was written. A plain tuple:
# every body of several optimizers makes one of each.
GradientSnapshot: TypeAlias = tuple[Any, Any, Any]
# Gradients that have to be divided by the same number.
Plan: TypeAlias = list[tuple[Scalar, list[Any]]]


class Slots(abc.ABC):
    """What a framework says of gradients, and does with them.

    Attributes:
        also_unknown: What else of the framework leaves gradients of which nobody can tell, for a message.
    """

    also_unknown: ClassVar[str] = ""

    @abc.abstractmethod
    def snapshot(self, slots: Iterable[Any]) -> list[GradientSnapshot]:
        """Return what is in some slots now."""

    @abc.abstractmethod
    def is_zero(self, gradient: Any) -> bool:
        """Return whether a gradient is zeros, which carry every scale. Sync: one."""

    @abc.abstractmethod
    def divide(self, gradients: Sequence[Any], divisor: Scalar) -> None:
        """Divide gradients in place."""

    @abc.abstractmethod
    def sharers(self, own: Provenance, slots: Sequence[Any]) -> Iterable[tuple[Provenance, Sequence[Any]]]:
        """Return the provenance of each other optimizer that holds some of these slots, and which these are."""

    def keep(self, scale: Scalar) -> Scalar:
        """Return a scale as it is now; a copy where it moves in place."""
        return scale


class _Note(NamedTuple):
    gradient: weakref.ref[Any]
    version: Any  # None: no matter
    scale: Scalar  # or UNKNOWN


class Provenance(NotCopied):
    """What is noted of one optimizer's gradients: `notes`, by the slot's id, is empty nearly always."""

    def __init__(self, slots: Slots) -> None:
        self.notes: dict[int, _Note] = {}
        self._slots = slots

    def note(self, slots: Iterable[Any], scale: Scalar, stays: bool = False) -> None:
        """Note that gradients in slots carry this scale, or `UNKNOWN`; where it `stays`, whatever writes to them."""
        snapshots = self._slots.snapshot(slots)
        self._note([(slot, gradient, None) for slot, gradient, _ in snapshots] if stays else snapshots, scale)

    def _note(self, snapshots: Iterable[GradientSnapshot], scale: Scalar) -> None:
        scale = scale if scale is UNKNOWN else self._slots.keep(scale)
        for slot, gradient, version in snapshots:
            if gradient is not None:
                self.notes[id(slot)] = _Note(weakref.ref(gradient), version, scale)

    def scale_of(self, snapshot: GradientSnapshot, default: Scalar) -> Scalar:
        """Return the scale that was noted of this very gradient, or else the default."""
        slot, gradient, version = snapshot
        note = self.notes.get(id(slot))
        same = note is not None and note.version in (None, version) and note.gradient() is gradient
        return note.scale if note is not None and same else default

    def are_unknown(self, slots: Iterable[Any]) -> bool:
        """Return whether gradients are left whose scale is unknown. Sync: one a gradient, where there are."""
        return any(
            not self._slots.is_zero(snapshot[1])
            for snapshot in self._slots.snapshot(slots)
            if snapshot[1] is not None and self.scale_of(snapshot, 1.0) is UNKNOWN
        )

    def note_foreign(self, before: Sequence[GradientSnapshot], default: Scalar, scale: Scalar) -> None:
        """Note the gradients that a backward has written to whose loss had this scale, for other optimizers.

        Args:
            before: What was in the slots before it.
            default: What gradients carried then that nothing is noted of; `UNKNOWN` where they must not be added to.
            scale: The loss scale of the backward.
        """
        for earlier, now in zip(before, self._slots.snapshot([slot for slot, _, _ in before]), strict=True):
            if now[1] is earlier[1] and now[2] == earlier[2]:
                continue
            carried = scale if earlier[1] is None else self.scale_of(earlier, default)
            self._note([now], scale if default is not UNKNOWN and _are_same(carried, scale) else UNKNOWN)

    def plan(self, slots: Iterable[Any], scale: Scalar, default: Scalar) -> Plan:
        """List gradients that do not carry a scale yet, with what they must be divided by to do so.

        Args:
            slots: Where they are.
            scale: What they shall carry.
            default: What gradients carry that nothing is noted of.

        Raises:
            ProtocolError: Nobody can tell what one carries, and it is more than zeros.

        Sync: none; one for each gradient of which nobody can tell.
        """
        if not self.notes and _are_same(default, scale):
            return []
        kinds: Plan = []
        for snapshot in self._slots.snapshot(slots):
            gradient = snapshot[1]
            if gradient is None:
                continue
            carried = self.scale_of(snapshot, default) if self.notes else default
            if carried is UNKNOWN:
                if not self._slots.is_zero(gradient):
                    raise ProtocolError(
                        f"gradients hang on the parameters that a skipped step left{self._slots.also_unknown}, or that "
                        f"carry more than one loss scale because a loss was scaled for other optimizers; accepted: "
                        f"cleared gradients, or scale_loss with all the optimizers whose gradients a backward makes. "
                        f"Call opt.zero_grad()."
                    )
            elif not _are_same(carried, scale):
                for other, gradients in kinds:
                    if _are_same(carried, other):
                        gradients.append(gradient)
                        break
                else:
                    kinds.append((carried, [gradient]))
        return [(carried / scale, gradients) for carried, gradients in kinds]

    def bring_to(self, member: Member, slots: Sequence[Any], scale: Scalar, default: Scalar) -> None:
        """Have all gradients carry one scale; the stage is "changing" after it where some were divided.

        What other optimizers know of these is out of date then, until one of them unscales or clears them.

        Args:
            member: The optimizer's place in the protocol.
            slots: As `plan`, which also says what is raised and how often a device is waited for.
            scale: As `plan`.
            default: As `plan`.
        """
        plan = self.plan(slots, scale, default)
        if plan:
            member.begin_change()
            for other, shared in self._slots.sharers(self, slots):
                other.note(shared, UNKNOWN, stays=True)
            for divisor, gradients in plan:
                self._slots.divide(gradients, divisor)
        self.notes = {}


OptimizerT = TypeVar("OptimizerT")


def holders(
    slots: Iterable[Any], others: Iterable[OptimizerT], held_by: Callable[[OptimizerT], Iterable[Any]]
) -> list[tuple[OptimizerT, list[Any]]]:
    """List those of some optimizers that hold some of these slots, and which slots these are."""
    ids = set(map(id, slots))
    pairs = [(other, [slot for slot in held_by(other) if id(slot) in ids]) for other in others]
    return [(other, shared) for other, shared in pairs if shared]


def check_not_shared(loss_id: int, sharing: Iterable[Member]) -> None:
    """Raise where gradients would be put aside, for a loss of another id, that another optimizer waits for.

    Args:
        loss_id: The loss's.
        sharing: The places of optimizers that share parameters.

    Raises:
        ProtocolError: One of them waits for its step.
    """
    if any(member.stage == "scaled" for member in sharing):
        raise ProtocolError(
            f"scale_loss(loss_id={loss_id}) after a loss of another id, and the optimizer shares parameters with "
            f"another one that waits for its step; accepted: loss scales by loss_id where every parameter belongs "
            f"to one optimizer, or one loss scale for all losses. Leave loss_id out, or step the other optimizer "
            f"first."
        )


def _are_same(scale: Scalar, other: Scalar) -> bool:
    """Return whether two scales are known to be equal without looking at a device."""
    if scale is other:
        return True
    if isinstance(scale, (int, float)) and isinstance(other, (int, float)):  # nearly always
        return scale == other
    return is_number(scale) and is_number(other) and scale == other
