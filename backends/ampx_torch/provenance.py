"""Provenance of the gradients that hang on parameters, and the wrapped optimizers that may share them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any, ClassVar, Final

import torch

from ampx.protocol import Member
from ampx.provenance import UNKNOWN, GradientSnapshot, Provenance, Slots, holders
from ampx.scale_state import is_one

from .gradients import any_nonzero, unscale_
from .trees import gradient_of

# The wrapped optimizers that are alive, some of which may share parameters. No WeakSet, whose length is a call.
living: Final[set[weakref.ref[Any]]] = set()


def wrapped_optimizers() -> list[Any]:
    """List the wrapped optimizers that are alive."""
    return [optimizer for reference in list(living) if (optimizer := reference()) is not None]


def sharers(own: Provenance, leaves: Iterable[Any], idle: bool = False) -> list[tuple[Any, list[Any]]]:
    """List the other optimizers that have some of these leaves, and which; with `idle`, those too that wait for none.

    An idle optimizer takes gradients for unscaled, so that it matters only where they are not.
    """
    others = [other for other in wrapped_optimizers() if other.provenance is not own]
    waiting = [other for other in others if idle or other.ampx_member.stage == "scaled" or other.provenance.notes]
    return holders(leaves, waiting, lambda other: other.leaves()) if waiting else []


class ParameterSlots(Slots):
    """Parameters; torch counts how often a tensor is written."""

    also_unknown: ClassVar[str] = ", that were there before add_param_group"

    def snapshot(self, slots: Iterable[torch.Tensor]) -> list[GradientSnapshot]:
        """Return the parameters' gradients, and how often they were written."""
        pairs = [(parameter, gradient_of(parameter)) for parameter in slots]
        return [(own, gradient, 0 if gradient is None else gradient._version) for own, gradient in pairs]

    def is_zero(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is zeros. Sync: one."""
        return not any_nonzero(gradient)

    def divide(self, gradients: Sequence[torch.Tensor], divisor: Any) -> None:
        """Divide gradients in place, with torch's own kernel."""
        unscale_(gradients, divisor)

    def sharers(
        self, own: Provenance, slots: Sequence[torch.Tensor]
    ) -> Sequence[tuple[Provenance, Sequence[torch.Tensor]]]:
        """Return the provenance of each other optimizer that has some of these leaves, and which."""
        return [(other.provenance, shared) for other, shared in sharers(own, slots, idle=True)]

    def keep(self, scale: Any) -> Any:
        """Return a scale as it is now: on a device it moves in place."""
        return scale.clone() if isinstance(scale, torch.Tensor) else scale


SLOTS: Final = ParameterSlots()


class OptimizerProvenance(Provenance):
    """Provenance of one wrapped optimizer's gradients, and the `scale_loss` bodies that make them.

    Attributes:
        scale: The loss scale of the last body.
    """

    def __init__(self, member: Member) -> None:
        super().__init__(SLOTS)
        self._member = member
        self.scale: Any = 1.0
        self._bodies = 0  # how many began
        self._thread: int | None = None  # where the last one ran

    def begin_body(self, scale: Any) -> None:
        """Note that a body begins."""
        self._bodies += 1
        self.scale, self._thread = scale, get_ident()

    def bring_together(self, leaves: Sequence[torch.Tensor]) -> None:
        """Have gradients to which losses of other optimizers were added carry what the others of this one carry."""
        scale = self._member.factor if self._member.stage == "scaled" else 1.0
        self.bring_to(self._member, leaves, scale, scale)
        self._member.end_change()

    def note_added(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note gradients that new parameters bring along: where a step has to unscale all, they are scaled as well."""
        if self._member.stage in ("idle", "unscaled") and self._scales:
            self.note(parameters, UNKNOWN)

    def are_scaled(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether gradients are left that are known to carry a loss scale, though nothing is pending."""
        scales = [self.scale_of(snapshot, 1.0) for snapshot in SLOTS.snapshot(parameters)] if self.notes else []
        return any(scale is not UNKNOWN and (type(scale) is not float or scale != 1.0) for scale in scales)

    # -- bodies of other optimizers ----------------------------------------------------------------

    @property
    def _scales(self) -> bool:
        """Whether a loss scale may be other than 1."""
        return self._member.group.enabled and not is_one(self._member.group.config)

    def concerns(self, scale: Any) -> bool:
        """Return whether it matters what a body of other optimizers, with this loss scale, writes."""
        member = self._member
        if not member.group.enabled or (type(scale) is float and scale == 1.0 and not self._scales):
            return False
        # What a body of this one does, or another thread, is no other optimizer's doing.
        return member.stage not in ("inside", "changing", "interrupted") and self._is_here()

    def _is_here(self) -> bool:
        return self._thread in (None, get_ident())

    def look(self, leaves: Iterable[torch.Tensor]) -> tuple[int, list[GradientSnapshot]]:
        """Return the gradients before such a body, for `note_written`."""
        return self._bodies, SLOTS.snapshot(leaves)

    def note_written(self, before: tuple[int, list[GradientSnapshot]], scale: Any) -> None:
        """Note the gradients to which it has written since, unless a body of this optimizer began meanwhile."""
        bodies, snapshots = before
        if bodies == self._bodies and self._is_here():
            member = self._member
            default = {"idle": 1.0, "scaled": member.factor}.get(member.stage)
            self.note_foreign(snapshots, default, scale)
