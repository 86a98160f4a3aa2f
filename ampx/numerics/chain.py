"""The values on the way to a failing place: back along inputs, to the last that agrees with float32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .compare import Key, bound, error_of, key_of
from .operations import family
from .places import Place, flushes
from .probe import Reading, Stats
from .tolerance import percent

LONGEST: Final = 8


@dataclass(frozen=True)
class Link:
    """A value on the way to a failing place.

    Attributes:
        place: Where it is, and the value in the precision that fails.
        float32: The value in float32; None where that has none there.
        error: How far it is from float32's, relative to the norm; infinity where only float32's is finite.
    """

    place: Place
    float32: Stats | None
    error: float

    def __str__(self) -> str:
        """Return what computes the value, its ranges, and how far it is from float32's."""
        exact = "" if self.float32 is None else f", in float32 {_range(self.float32)}"
        off = "not finite" if math.isinf(self.error) else f"off by {percent(self.error)}"
        return f"{self.place.source}: {_range(self.place.value)}{exact}, {off}"


def _range(stats: Stats) -> str:
    finite = stats.elements > stats.nonfinite
    return f"{stats.smallest:.3g} to {stats.largest:.3g}" if finite else "nothing finite"


def chain(readings: Sequence[Reading], position: int, exact: Mapping[Key, Reading], dtype: str) -> tuple[Link, ...]:
    """Return the values that lead to a place, which is the last; the first agrees with float32, if it is known.

    What an operation received is found by its range: the value before it that has the same largest, smallest or lowest
    number. Of several the one that is furthest from float32 is followed. Casts are left out.

    Args:
        readings: In the precision that fails, gradients unscaled.
        position: Of the place.
        exact: Float32's readings by place.
        dtype: The precision that fails.
    """
    links: list[Link] = []
    at: int | None = position
    while at is not None and len(links) < LONGEST:
        entry = readings[at]
        other = exact.get(key_of(entry))
        if family(entry.operation) != "cast" or at == position:
            links.append(Link(Place.of(entry), None if other is None else other.value, _error(entry, other)))
        if at != position and _agrees(entry, other, bound(dtype, at)):
            break
        errors = {
            before: _error(readings[before], exact.get(key_of(readings[before])))
            for before in sorted(_producers(readings, at))
        }
        at = max(errors, key=errors.__getitem__, default=None)
    return tuple(reversed(links))


def _error(entry: Reading, other: Reading | None) -> float:
    """Return how far a value is from float32's; an infinity that float32 has not may be beside the sample."""
    new = other is not None and entry.value.nonfinite > other.value.nonfinite
    return math.inf if new else error_of(entry, other)


def _agrees(entry: Reading, other: Reading | None, limit: float) -> bool:
    return _error(entry, other) <= limit and not (other is not None and flushes(entry.value, other.value))


def _producers(readings: Sequence[Reading], position: int) -> set[int]:
    """Return the values before a position that it was computed of, or else those that its module received."""
    entry, later = readings[position], readings[position:]
    module = next((other for other in later if (other.module, other.operation) == (entry.module, "")), entry)
    before = [at for at in range(position) if readings[at].direction == entry.direction]
    return _with_range(readings, before, entry.inputs) or _with_range(readings, before, module.inputs)


def _with_range(readings: Sequence[Reading], before: Sequence[int], inputs: Stats) -> set[int]:
    """Return the latest values that share an end of a range with what was received."""
    latest = (
        next((at for at in reversed(before) if getattr(readings[at].value, end) == getattr(inputs, end)), None)
        for end in ("largest", "smallest", "lowest")
        if getattr(inputs, end)
    )
    # Modules return what an operation in them has computed: that is the first of the same values.
    values = [readings[at].value for at in latest if at is not None]
    return {next(at for at in before if readings[at].value == value) for value in values}
