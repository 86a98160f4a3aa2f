"""Which loss scale the gradients on an optimizer's parameters carry, where other losses wrote to them.

Paddle adds gradients up until somebody clears them. What a backward outside of an optimizer's `scale_loss` adds, or
what a step leaves, carries another scale than what the next backward inside adds. Paddle's own hook on each parameter
tells when something was added; nothing is read from the device for it.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from ampx.errors import ProtocolError
from ampx.protocol import Member

from .gradients import any_nonzero, rescale, unscale

# What gradients carry that no scale can be told of.
UNKNOWN: Final = math.inf


class _Thread(threading.local):
    """The `scale_loss` bodies that run in the calling thread, the innermost last."""

    bodies: tuple[tuple[weakref.ref[Writes], float], ...] = ()


_thread = _Thread()
# By name, those whose gradients a backward of the calling thread has written to; its optimizer is not known yet.
_written: Final = threading.local()
_numbers: Final = itertools.count()
# By scale, the scaled losses whose backwards have run in the calling thread since then.
_ran: Final = threading.local()


def watch_loss(scaled: Any, scale: float) -> None:
    """Have a scaled loss tell when its backward runs, which may be outside of its body. It runs no Python code."""
    if not scaled.stop_gradient:
        scaled.register_hook(partial(setattr, _ran, repr(scale)))


def _attribute() -> None:
    """Note whose backwards have written since the last time: as long as the same bodies run, it is the same."""
    written: dict[str, weakref.ref[Writes]] = _written.__dict__
    for name, reference in list(written.items()):
        if (writes := reference()) is not None:
            writes.attribute({float(scale) for scale in _ran.__dict__})
        del written[name]
    _ran.__dict__.clear()


@contextmanager
def unnoticed() -> Iterator[None]:
    """Return a region whose backwards write to gradients that are put back as they were."""
    _attribute()
    try:
        yield
    finally:
        _written.__dict__.clear()


def _bodies() -> list[tuple[Writes, float]]:
    """Return the bodies that run in the calling thread; one that an exception kept open ends with its optimizer."""
    return [(writes, scale) for reference, scale in _thread.bodies if (writes := reference()) is not None]


class Writes:
    """What is known of one optimizer's gradients."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._own = False  # a body of this optimizer wrote since the last step
        self._carried: set[float] = set()  # by what others wrote, or the last step left
        self._name = f"writes_{next(_numbers)}"

    def watch(self, parameters: Iterable[Any]) -> None:
        """Have the parameters tell when a backward has added to their gradients.

        Paddle's hook cannot be taken off: it holds this object weakly. It runs no Python code, in which a signal could
        be handled: an exception there would become a SystemError of Paddle's backward.
        """
        note = partial(setattr, _written, self._name, weakref.ref(self))
        for parameter in parameters:
            parameter._register_backward_hook(note)

    def attribute(self, ran: set[float]) -> None:
        """Note by the bodies that run, and by the scaled losses that ran, which scale a backward has written with."""
        bodies = _bodies()
        if any(writes is self for writes, _ in bodies):
            self._own = True
        elif bodies:
            self._carried.add(bodies[-1][1])
        elif not ran:
            self._carried.add(1.0)
        elif self._own or self._member.stage == "unscaled" or not ran.intersection(self._member.factors.values()):
            self._carried.add(UNKNOWN)
        # Else it is the backward of a loss that was scaled for this optimizer: it runs outside of its body.

    def enter(self, scale: float) -> None:
        """Note that a body of this optimizer begins."""
        _attribute()
        self._end_body()
        _thread.bodies = (*_thread.bodies, (weakref.ref(self), scale))

    def leave(self, unfinished: bool = False) -> None:
        """Note that it ends; what an unfinished one wrote carries its scale, if it stays."""
        _attribute()
        if self._own and unfinished:
            self._carried.update(scale for writes, scale in _bodies() if writes is self)
        self._end_body()

    def _end_body(self) -> None:
        _thread.bodies = tuple((weakref.ref(writes), scale) for writes, scale in _bodies() if writes is not self)

    def rescale_existing(self, owners: list[Any], scale: float) -> bool:
        """Bring the gradients of these parameters, there before the first backward of a step, to its scale.

        Return whether any were divided.

        Sync: as `check_left`, which comes first.
        """
        self.check_left(owners)
        if not self._carried:
            return False
        (factor,) = self._carried
        divides = factor != scale and bool(owners)
        if divides:
            self._member.begin_change()  # entering the body ends it, or leaving it
            rescale(owners, scale / factor)
        self._carried = {scale}
        return divides

    def check_left(self, owners: list[Any]) -> None:
        """Raise where gradients there before the first backward of a step cannot be brought to its scale.

        Raises:
            ProtocolError: They carry several scales, or one that nobody knows, and are more than zeros.

        Sync: none; some where they carry several scales, or were left by a skipped step.
        """
        _attribute()
        if not self._carried or (len(self._carried) == 1 and UNKNOWN not in self._carried):
            return
        if any_nonzero(owners):
            names = ", ".join(parameter.name for parameter in owners[:5])
            raise ProtocolError(
                f"scale_loss was called while gradients of a skipped step or of other losses hang on the parameters "
                f"({names}); they carry other loss scales, and nobody can tell "
                f"which; accepted: cleared gradients. Call opt.clear_grad() first, or pass scale_loss all optimizers "
                f"that a loss has parameters of."
            )
        self._carried = set()

    def check(self) -> None:
        """Raise where another loss has added to pending gradients with another scale; true ones carry 1."""
        _attribute()
        factors = {1.0} if self._member.stage == "unscaled" else set(self._member.factors.values())
        if self._carried and (len(factors) > 1 or self._carried != factors):
            raise ProtocolError(
                f"a backward outside of this optimizer's scale_loss has added to its gradients; they carry the scales "
                f"{', '.join(f'{factor:g}' for factor in sorted(self._carried | factors))} now; accepted: one. Give "
                f"scale_loss all optimizers that a loss has parameters of, and call opt.clear_grad() to go on."
            )

    def are_scaled(self, owners: list[Any]) -> bool:
        """Return whether gradients are not true though nothing is pending. Sync: one a gradient, where they may be."""
        _attribute()
        if UNKNOWN in self._carried:  # a skipped step left inf or NaN, if they were not cleared since
            return any_nonzero(owners) and not unscale(owners, 1.0)
        return not self._carried <= {1.0} and any_nonzero(owners)

    def await_scale(self) -> bool:
        """Return whether gradients that others made carry a scale: the next body brings them to its own."""
        _attribute()
        return not self._carried <= {1.0, UNKNOWN}

    def are_unknown(self, owners: list[Any]) -> bool:
        """Return whether a skipped step left gradients. Sync: one a gradient, where it did."""
        _attribute()
        return UNKNOWN in self._carried and any_nonzero(owners)

    def note_rescaled(self, scale: float) -> None:
        """Note that the gradients, those that were left included, were rescaled to this scale."""
        self._carried = {scale} if self._carried else set()

    def note_mixed(self) -> None:
        """Note that another optimizer, which shares some of these gradients, divided those."""
        self._carried = {UNKNOWN}

    def note_unscaled(self) -> None:
        """Note that the gradients are unscaled now, those that others added as well."""
        self._carried = set()

    def note_step(self, finite: bool) -> None:
        """Note that a step used the gradients: they are true now, or anything where it was skipped."""
        self._own, self._carried = False, {1.0 if finite else UNKNOWN}

    def note_cleared(self, inside: bool = False) -> None:
        """Note that the optimizer cleared its gradients, perhaps inside of a body of its own."""
        _written.__dict__.pop(self._name, None)
        self._own, self._carried = False, set()
        if not inside:
            self.leave()
