"""The place at which a batch first fails, or at which a finite value is first wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ampx.formats import FORMATS

from .compare import Key, bound, error_of, key_of
from .operations import family, normalised
from .probe import Direction, Reading, Stats

# A finite value that is off by more than this is wrong, whatever rounding explains.
WRONG: Final = 0.25


@dataclass(frozen=True)
class Place:
    """A value in the run of a batch: see `ampx.Reading` for what the fields are."""

    module: str
    kind: str
    operation: str
    direction: Direction
    call: int
    dtype: str
    value: Stats
    inputs: Stats
    place: str

    @classmethod
    def of(cls, reading: Reading) -> Place:
        """Return the place of a reading."""
        return cls(**{name: getattr(reading, name) for name in cls.__dataclass_fields__})

    @property
    def source(self) -> str:
        """What computes the value, with its line."""
        module = f"module {self.module!r}" if self.module else ""
        names = " in ".join(filter(None, (self.operation, module))) or "the model"
        return f"{names} ({self.place})" if self.place else names

    def __str__(self) -> str:
        """Name the value, as the subject of a sentence."""
        if self.direction == "forward":
            return f"the output of {self.source}"
        return f"the gradient {'computed by' if self.operation else 'of the output of'} {self.source}"


def of_the_step(readings: Sequence[Reading]) -> tuple[Reading, ...]:
    """Leave out what is computed before the first module and behind the last backward: initializers and optimizers.

    Where no module computes, it is not known where the step begins, and nothing is left out in front. Where the step
    receives what is not finite, it begins with the operation that made it, if any did: the script prepares a batch.
    """
    backward = [position for position, entry in enumerate(readings) if entry.direction == "backward"]
    return tuple(readings[_first_of_the_step(readings) : backward[-1] + 1 if backward else None])


def _first_of_the_step(readings: Sequence[Reading]) -> int:
    first = next((position for position, entry in enumerate(readings) if entry.module or entry.kind), 0)
    broken = next((entry for entry in readings[first:] if entry.value.nonfinite or entry.inputs.nonfinite), None)
    if broken is None or not broken.inputs.nonfinite:
        return first
    return next((position for position, entry in enumerate(readings[:first]) if is_origin(entry)), first)


def is_origin(entry: Reading) -> bool:
    """Return whether an operation makes what is not finite of what is."""
    return bool(entry.operation and entry.value.nonfinite and not entry.inputs.nonfinite)


def outermost(readings: Sequence[Reading], module: str = "") -> Reading | None:
    """Return the first output of the model that a module is part of: its inputs are the batch."""
    prefix, colon, _ = module.rpartition(":")
    outputs = (entry for entry in readings if entry.direction == "forward" and not entry.operation)
    return next((entry for entry in outputs if entry.module == prefix + colon), None)


# -- not finite --------------------------------------------------------------------------------------------------------


def first_failing(readings: Sequence[Reading], healthy: Mapping[Key, Reading] | None) -> int | None:
    """Return the position of the first value that is not finite, and should be; None where there is none.

    Args:
        readings: Of the run that fails.
        healthy: Of a run that does not: what is not finite there, either, such as a mask of -inf, is meant to be so.
            None where every run fails.
    """
    broken = [position for position, entry in enumerate(readings) if entry.value.nonfinite]
    if healthy is not None:
        new = [position for position in broken if _is_new(readings[position], healthy)]
        candidates = [position for position in new if not _is_handed_on(readings[position], healthy)] or new
    else:
        candidates = [position for position in broken if not _is_meant(readings, position)] or broken
    return candidates[0] if candidates else None


def _is_new(entry: Reading, healthy: Mapping[Key, Reading]) -> bool:
    """Return whether more of a value is not finite than in a healthy run."""
    other = healthy.get(key_of(entry))
    return other is None or other.value.nonfinite < entry.value.nonfinite


def _is_handed_on(entry: Reading, healthy: Mapping[Key, Reading]) -> bool:
    """Return whether an operation that a healthy run does not have only passes on what was not finite before it.

    Casts do so, and the division of gradients by the loss scale.
    """
    return key_of(entry) not in healthy and entry.inputs.nonfinite > 0


def _is_meant(readings: Sequence[Reading], position: int) -> bool:
    """Return whether a value is no failure: a mask's infinity, or what an operation makes finite numbers of."""
    entry = readings[position]
    if entry.direction == "backward":
        return False
    if entry.value.nan:
        return _is_mended(readings[position + 1 :])
    if family(entry.operation) == "mask":
        return True
    for later in readings[position + 1 :]:
        if later.direction == "backward" or later.value.nan:
            return False
        if later.inputs.nonfinite and not later.value.nonfinite:
            return True
    return False


def _is_mended(later: Sequence[Reading]) -> bool:
    """Return whether an operation makes finite numbers of NaN, and what fails behind it is made of finite ones."""
    forward = [entry for entry in later if entry.direction == "forward"]
    mended = (at for at, entry in enumerate(forward) if entry.inputs.nonfinite and not entry.value.nonfinite)
    fails = (entry for at in mended for entry in forward[at:] if entry.value.nonfinite)
    first = next(fails, None)
    return first is not None and not first.inputs.nonfinite


def masked_whole(readings: Sequence[Reading]) -> int | None:
    """Return the position of the first NaN, where it comes of infinities that only a mask is made of."""
    first = next((position for position, entry in enumerate(readings) if entry.value.nan), None)
    if first is None or readings[first].inputs.nan or not readings[first].inputs.nonfinite:
        return None
    return first if _come_of_masks(readings, first) else None


def _come_of_masks(readings: Sequence[Reading], position: int) -> bool:
    """Return whether the infinities that a value receives are made by masks, or come as an input of a softmax."""
    broken = (other for other in readings[:position] if other.value.nonfinite)
    origins = {family(other.operation) for other in broken if not other.inputs.nonfinite}
    if origins:
        return origins == {"mask"}
    # Of a bad batch a product makes NaN before a softmax does, or a single infinity makes NaN of a row.
    entry, operation = readings[position], normalised(readings[position].operation)
    return "attention" in operation or ("softmax" in operation and entry.inputs.nonfinite >= entry.value.nan)


def last_finite(readings: Sequence[Reading], position: int) -> Place | None:
    """Return the last finite value before a position that is no cast."""
    for entry in reversed(readings[:position]):
        if not entry.value.nonfinite and entry.value.elements and family(entry.operation) != "cast":
            return Place.of(entry)
    return None


def is_mask_constant(stats: Stats, largest: float) -> bool:
    """Return whether the lowest value is a constant of the script: -1e9, or the lowest number of a dtype."""
    low = -stats.lowest
    if low <= largest or stats.largest > low:
        return False
    digits = math.log10(low)
    powers = abs(digits - round(digits)) < 1e-3
    return powers or any(abs(low / form.largest - 1) < 1e-3 for form in FORMATS.values())


# -- finite and wrong --------------------------------------------------------------------------------------------------


def flushes(value: Stats, exact: Stats) -> bool:
    """Return whether most of what is not zero in float32 is zero."""
    nonzero = exact.elements - exact.zeros
    return value.elements == exact.elements and 2 * (value.zeros - exact.zeros) > nonzero > 0


def first_wrong(
    readings: Sequence[Reading], exact: Mapping[Key, Reading], dtype: str, loss_is_wrong: bool = False
) -> int | None:
    """Return the position of the first value that spoils a finite result; None where no module's output is wrong.

    An infinity that does no harm, such as that of a mask, makes no output wrong. A result may be wrong though every
    output is right in its norm: what an offset hides there is seen in the loss.

    Args:
        readings: In low precision, with samples.
        exact: In float32, with samples.
        dtype: The low precision.
        loss_is_wrong: Whether the loss is, whatever the outputs of modules are.
    """
    wrong = wrong_values(readings, exact, dtype, "forward")
    end = len(readings) if loss_is_wrong and wrong else None
    output = next((position for position in wrong if not readings[position].operation), end)
    if output is None:
        return None
    before = ((position, entry) for position, entry in enumerate(readings[:output]) if entry.direction == "forward")
    spoilt = (position for position, entry in before if _is_spoilt(entry, exact.get(key_of(entry))))
    return next(spoilt, wrong[0])


def wrong_values(
    readings: Sequence[Reading], exact: Mapping[Key, Reading], dtype: str, direction: Direction
) -> list[int]:
    """Return the positions of finite values in a pass that are off by more than rounding could explain."""
    own = ((position, entry) for position, entry in enumerate(readings) if entry.direction == direction)
    pairs = {position: (entry, exact.get(key_of(entry))) for position, entry in own}
    errors = {position: error_of(*pair) for position, pair in pairs.items() if _computes_digits(pair[1])}
    return [position for position, error in errors.items() if max(WRONG, bound(dtype, position)) < error < math.inf]


def _computes_digits(exact: Reading | None) -> bool:
    """Return whether a value in float32 has digits of its own; not so where numbers are only moved.

    Nor where a sum is no more than the rounding of its terms, as the gradient of what has no effect: that of a bias in
    front of a softmax, say. No run knows what it is.
    """
    if exact is None or family(exact.operation) != "sum" or not exact.value.elements:
        return exact is None or family(exact.operation) != "move"
    terms = exact.inputs.elements / exact.value.elements
    return exact.value.largest > terms * exact.inputs.largest * 2.0 ** -FORMATS["float32"].bits


def _is_spoilt(entry: Reading, other: Reading | None) -> bool:
    """Return whether a value has infinities or zeros that its exact value, or else what it came from, has not."""
    before = entry.inputs if other is None else other.value
    return entry.value.nonfinite > before.nonfinite or flushes(entry.value, before)


def is_low(entry: Reading) -> bool:
    """Return whether a value is in a dtype with fewer digits than float32."""
    return entry.dtype in FORMATS and FORMATS[entry.dtype].bits < FORMATS["float32"].bits


def cast_by_hand(reference: Sequence[Reading]) -> Reading | None:
    """Return the first value of a forward pass in float32 that is in low precision all the same; None for none.

    The script itself casts there, or it goes on with what a former step computed: no run of ours has it in float32.
    """
    return next((entry for entry in reference if entry.direction == "forward" and is_low(entry)), None)


def overflow_by_hand(reference: Sequence[Reading]) -> int | None:
    """Return the position of the first value, of a run in float32, that overflows as the script itself casts it."""
    for position, entry in enumerate(reference):
        if entry.direction == "forward" and is_low(entry) and _overflows(entry):
            return position
    return None


def _overflows(entry: Reading) -> bool:
    """Return whether a value is too large for its dtype: neither a mask, nor divided by zero, nor its logarithm."""
    if not entry.value.nonfinite or entry.inputs.nonfinite or not entry.inputs.elements:
        return False
    meant = family(entry.operation) in ("mask", "division", "logarithm")
    return not meant and not is_mask_constant(entry.inputs, FORMATS[entry.dtype].largest)
