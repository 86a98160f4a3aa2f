"""What backwards write to the gradients of an optimizer, and with which loss scale: Paddle's part of provenance.

Paddle adds gradients up until somebody clears them, which leaves zeros. It counts no writes, and makes a new object of
a gradient whenever it is asked. Its own hook on each parameter tells when something was added; nothing is read from the
device for it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

from ampx.protocol import Member
from ampx.provenance import UNKNOWN, GradientSnapshot, Provenance, Slots, holders
from ampx.scale_state import Scalar

from .gradients import any_nonzero, collect, gradients_of, parameters, rescale, unscale

# What gradients carry that were cleared: zeros carry every scale.
ANY: Final = object()

# By scale, the scaled losses whose backwards have run in the calling thread since the last `look`.
_ran: Final = threading.local()
_watching: Final[dict[int, weakref.ref[Writes]]] = {}
_numbers: Final = itertools.count()


def watch_loss(scaled: Any, scale: float) -> None:
    """Have a scaled loss tell when its backward runs, which may be outside of its body. It runs no Python code."""
    if not scaled.stop_gradient:
        scaled._register_grad_hook(partial(setattr, _ran, repr(scale)))


def look(scale: float | None = None) -> None:
    """Have all optimizers note what backwards of the calling thread wrote to their gradients since the last look.

    Args:
        scale: The loss scale of the body that ends here; None outside of bodies.
    """
    for number, reference in list(_watching.items()):
        if (writes := reference()) is None:
            _watching.pop(number, None)
        elif writes.body is None and writes.written.__dict__:  # else its own body writes
            writes.attribute(scale)
    _ran.__dict__.clear()


@contextmanager
def unnoticed() -> Iterator[None]:
    """Return a region whose backwards write to gradients that are put back as they were."""
    look()
    try:
        yield
    finally:
        for reference in list(_watching.values()):
            if (writes := reference()) is not None:
                writes.written.__dict__.clear()
        _ran.__dict__.clear()


class ParameterSlots(Slots):
    """Parameters, each of which stands for its gradient, too."""

    also_unknown: ClassVar[str] = ", that a backward outside of scale_loss has added to"

    def snapshot(self, slots: Iterable[Any]) -> list[GradientSnapshot]:
        """Return which parameters have a gradient."""
        owners = list(slots)
        pairs = zip(owners, gradients_of(owners), strict=True)
        return [(owner, None if gradient is None else owner, None) for owner, gradient in pairs]

    def is_zero(self, gradient: Any) -> bool:
        """Return whether a gradient is zeros. Sync: one."""
        return not any_nonzero((gradient,))

    def divide(self, gradients: Sequence[Any], divisor: Scalar) -> None:
        """Divide gradients in place."""
        rescale(gradients, 1.0 / divisor)

    def sharers(self, own: Provenance, slots: Sequence[Any]) -> list[tuple[Provenance, list[Any]]]:
        """Return the provenance of each other optimizer that has gradients, and the parameters that both hold."""
        return [(other.provenance, shared) for other, shared in sharers(own, slots)]


_SLOTS: Final = ParameterSlots()


def sharers(own: Provenance, owned: Iterable[Any]) -> list[tuple[Writes, list[Any]]]:
    """List the other optimizers that have gradients and hold some of these parameters, and which these are."""
    waiting = [
        other
        for reference in list(_watching.values())
        if (other := reference()) is not None
        and other.provenance is not own
        and (other.member.factors or other.provenance.notes or other.left is not ANY)
    ]
    return holders(owned, waiting, lambda other: parameters(other.optimizer)) if waiting else []


class Writes:
    """What the gradients of one optimizer carry, beyond its stage.

    Attributes:
        member: The optimizer's place in the protocol.
        optimizer: The raw optimizer.
        provenance: Gradients that carry another scale than `carried`, or an unknown one.
        left: What the others carry while nothing is pending: a scale, `UNKNOWN` after a skipped step, or `ANY`.
        body: The loss scale of the optimizer's own body that runs, or None.
        own: A backward in a body of its own has written since the last step.
        written: By id, weak references to the parameters that backwards of a thread have written to since `look`.
    """

    def __init__(self, member: Member, optimizer: Any) -> None:
        self.member = member
        self.optimizer = optimizer
        self.provenance = Provenance(_SLOTS)
        self.left: Any = ANY
        self.body: float | None = None
        self.own = False
        self.written = threading.local()

    def watch(self) -> None:
        """Have the parameters tell when a backward has added to their gradients.

        Paddle's hook cannot be taken off: it holds neither this object nor the parameter. It runs no Python code, in
        which a signal could be handled: an exception there would become a SystemError of Paddle's backward.
        """
        _watching[next(_numbers)] = weakref.ref(self)
        for parameter in parameters(self.optimizer):
            note = partial(setattr, self.written, str(id(parameter)), weakref.ref(parameter))
            parameter._register_backward_hook(note)

    @property
    def carried(self) -> Any:
        """What gradients carry that nothing is noted of: a scale, `UNKNOWN` or `ANY`."""
        member = self.member
        if member.stage == "unscaled":
            return 1.0
        return member.factor if member.factors else self.left

    # -- backwards -----------------------------------------------------------------------------------------------------

    def enter(self, scale: float) -> None:
        """Note that a body of this optimizer begins, after a `look`."""
        self.body = scale

    def leave(self, unfinished: bool = False) -> None:
        """Note that it ends; what an unfinished one wrote carries its scale, if it stays."""
        scale, self.body = self.body, None
        self.own = self.own or bool(self.written.__dict__)
        if not unfinished:
            self.written.__dict__.clear()
        look(scale)

    def attribute(self, scale: float | None) -> None:
        """Note what was written since the last look, in the body of others with this scale; None outside of bodies."""
        written, carried, noted = self.written.__dict__, self.carried, self.provenance.notes
        if scale is None:
            scale = self._outside(carried)
        if noted or scale != carried:
            owners = [owner for reference in written.values() if (owner := reference()) is not None]
            # Nothing but that they were written to: Paddle has no version of a gradient to compare.
            before = [(own, None if carried is ANY and id(own) not in noted else own, "before") for own in owners]
            self.provenance.note_foreign(before, carried, scale)
        written.clear()

    def _outside(self, carried: Any) -> Any:
        """Return which scale backwards outside of bodies have added with since the last look."""
        ran = set(map(float, _ran.__dict__))
        if not ran:
            return 1.0
        # Of a loss that was scaled for this optimizer the backward may run outside of its body, if none did inside.
        late = not self.own and self.member.stage != "unscaled" and not ran.isdisjoint(self.member.factors.values())
        return carried if late else UNKNOWN

    # -- what others wrote, or the last step left ----------------------------------------------------------------------

    def bring_together(self, scale: float | None = None) -> None:
        """Have all gradients carry one scale: this one, or that of those which are pending.

        Raises:
            ProtocolError: What they carry is unknown, and they are more than zeros.

        Sync: none; some where others wrote to them, or a skipped step left them.
        """
        look()
        if not self.provenance.notes and (scale is None or self.left in (ANY, scale)):
            return
        carried = self.carried
        scale = carried if scale is None else scale
        default = scale if carried is ANY else carried
        self.provenance.bring_to(self.member, parameters(self.optimizer), scale, default)
        self.left = ANY if self.left is UNKNOWN else scale  # of an unknown scale are zeros
        self.member.end_change()

    def check(self) -> None:
        """Raise as `bring_together` to whatever scale."""
        look()
        carried = self.carried
        self.provenance.plan(parameters(self.optimizer), 1.0, 1.0 if carried is ANY else carried)

    def are_scaled(self) -> bool:
        """Return whether gradients are not unscaled though nothing is pending. Sync: one a gradient, where they may be.

        A skipped step left inf or NaN, if they were not cleared since.
        """
        scaled = [owner for owner, scale in self._scales() if scale != 1.0]
        return any_nonzero(scaled) and not (self.left is UNKNOWN and bool(unscale(scaled, 1.0)))

    def are_unknown(self) -> bool:
        """Return whether a skipped step left gradients that were not cleared. Sync: one a gradient, where it did."""
        return any_nonzero([owner for owner, scale in self._scales() if scale is UNKNOWN])

    def _scales(self) -> list[tuple[Any, Any]]:
        look()
        carried = 1.0 if self.carried is ANY else self.carried
        owners = collect(self.optimizer)
        return [(owner, self.provenance.scale_of((owner, owner, None), carried)) for owner in owners]

    def note_brought(self, scale: float) -> None:
        """Note that all gradients carry this scale now; those of an unknown one are zeros."""
        if self.provenance.notes or self.left is not ANY:
            self.provenance.notes, self.left = {}, ANY if self.left is UNKNOWN else scale

    def note_unscaled(self) -> None:
        """Note that the gradients are unscaled now, those that others added as well."""
        self.provenance.notes, self.left = {}, ANY

    def note_step(self, finite: bool) -> None:
        """Note that a step used the gradients: they are unscaled now, or anything where it was skipped."""
        self.own, self.provenance.notes, self.left = False, {}, 1.0 if finite else UNKNOWN

    def note_cleared(self, inside: bool) -> None:
        """Note that the optimizer cleared its gradients, perhaps inside of a body of its own."""
        self.written.__dict__.clear()
        self.own, self.provenance.notes, self.left = False, {}, ANY
        if not inside:
            self.body = None
