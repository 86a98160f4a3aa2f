"""How far a run in low precision may be from float32: by what rounding alone does to the same run, measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ampx.backend import Array
from ampx.formats import FORMATS, digits_of

from .compare import MARGIN, ModuleError, bound
from .probe import Reading

# Losses and gradients that are further off than this are others, whatever rounding explains.
LARGEST_TOLERANCE: Final = 0.25
# What a number in bfloat16 may be off by: nothing in low precision is asked to be closer.
RESOLUTION: Final = 2.0 ** -FORMATS["bfloat16"].bits

# Module, direction and call of a value.
Place = tuple[str, str, int]


def place_of(error: ModuleError) -> Place:
    """Return the place of a value."""
    return error.module, error.direction, error.call


@dataclass(frozen=True)
class Distance:
    """How far a run is from float32's, each number relative to the norm.

    Attributes:
        loss: Of the losses.
        gradients: Of all gradients together.
        values: Of outputs of modules and the gradients of these, as `with_joined_gradients` has them.
    """

    loss: float
    gradients: float = 0.0
    values: Sequence[ModuleError] = ()


@dataclass(frozen=True)
class Tolerance:
    """How far a run may be from float32's.

    Attributes:
        loss: As in `Distance`.
        gradients: As in `Distance`.
        values: By place, what a value of a module may be off by; others by their `ModuleError.bound`.
    """

    loss: float
    gradients: float
    values: Mapping[Place, float] = field(default_factory=dict)

    def of(self, error: ModuleError) -> float:
        """Return what a value may be off by."""
        return self.values.get(place_of(error), min(LARGEST_TOLERANCE, error.bound))

    def at(self, tolerance: float | None) -> Tolerance:
        """Return this with loss and gradients as the user passed them, who expects no less of single values."""
        if tolerance is None:
            return self
        values = {place: max(tolerance, limit) for place, limit in self.values.items()}
        return Tolerance(tolerance, tolerance, values)

    def exceeded(self, distance: Distance) -> str:
        """Return in words by what a run is too far off; empty where it agrees."""
        numbers = [
            ("the loss is", distance.loss, self.loss),
            ("the gradients are", distance.gradients, self.gradients),
            *((_named(entry), entry.error, self.of(entry)) for entry in self._worst(distance.values)),
        ]
        for what, error, tolerance in numbers:
            if math.isinf(error):
                return f"{what} not finite"
            if error > tolerance:
                return f"{what} {percent(error)} from float32's (tolerance {percent(tolerance)})"
        return ""

    def smallest_scale(self, dtype: str, reference: Iterable[Reading]) -> float:
        """Return the smallest loss scale, a power of two, at which what a dtype flushes is far less than this.

        Args:
            dtype: A name of `FORMATS`.
            reference: A step in float32, watched, with samples.
        """
        allowed = (
            self.values.get((entry.module, entry.direction, entry.call), self.gradients) * _size(entry.sample)
            for entry in with_joined_gradients(reference)
            if entry.direction == "backward" and entry.sample is not None
        )
        least = min((error for error in allowed if error > 0), default=math.inf)
        needed = MARGIN * FORMATS[dtype].flushes_to / least
        return 2.0 ** math.ceil(math.log2(max(1.0, needed)))

    def _worst(self, errors: Iterable[ModuleError]) -> list[ModuleError]:
        """Return the value that is too far off by the largest factor; nothing of no values."""
        return sorted(errors, key=lambda entry: entry.error / self.of(entry))[-1:]


def _size(sample: Array) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(sample, dtype=np.float64)))) if sample.size else 0.0


def _named(error: ModuleError) -> str:
    what = "the output" if error.direction == "forward" else "the gradient of the output"
    return f"{what} of {repr(error.module) if error.module else 'the model'} is"


def percent(number: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{float(f'{100 * number:.2g}'):g} %"


def with_joined_gradients(readings: Iterable[Reading]) -> list[Reading]:
    """Return readings in which the gradients of a module's output are one value, whatever the number of its calls.

    Parameters get the sum of what the calls hand them. The gradient of a call that is small beside that of another may
    lose all of its digits to the smallest numbers of a dtype, and no parameter notices.

    So are outputs that no gradient comes back to, where one comes back to others, as those of a validation of one
    sample after another: the closer one of many is to zero, the more it is off, by chance.
    """
    values = [entry for entry in readings if not entry.operation]
    trained = {(entry.module, entry.call) for entry in values if entry.direction == "backward"}
    joined: dict[tuple[str, str, int | None], Reading] = {}
    for entry in values:
        alone = entry.direction == "forward" and (not trained or (entry.module, entry.call) in trained)
        key = (entry.module, entry.direction, entry.call if alone else None)
        before = joined.get(key)
        if before is None:
            joined[key] = entry if entry.direction == "forward" else replace(entry, call=0)
        else:
            joined[key] = _joined(before, entry)
    return list(joined.values())


def _joined(before: Reading, entry: Reading) -> Reading:
    """Return two values as one; without samples the first."""
    if before.sample is None or entry.sample is None:
        return before
    value = replace(before.value, nonfinite=before.value.nonfinite + entry.value.nonfinite)
    return replace(before, value=value, sample=np.concatenate([before.sample, entry.sample]))


def by_count(dtype: str, roundings: int, *noises: Distance) -> Tolerance:
    """Return the tolerance of so many roundings in a row, where their effect cannot be measured, or of larger noise."""
    limits = [bound(dtype, roundings), *(MARGIN * noise.loss for noise in noises)]
    limit = min(LARGEST_TOLERANCE, max(limits))
    return Tolerance(limit, limit)


def rounding(dtype: str, seed: int) -> dict[str, str]:
    """Return what `Probe.force` takes for a run in float32 that rounds what modules take and return.

    With seed 0 it rounds to the digits of the dtype, and with each further one to a bit less: so half of the numbers
    differ by their last digit, as if by chance.
    """
    return {"*": digits_of(max(1, FORMATS[dtype].bits - seed))}


def by_rounding(dtype: str, *noises: Distance, moved: float = 0.0) -> Tolerance:
    """Return the tolerance that the noise of a script explains: how far runs by `rounding` are from one another.

    So may be runs that were meant to be the same.

    What is `MARGIN` times as far off is more than rounding. What all of these runs are off by is no noise: rounding is
    the fault, such as that of a probability to 1. A value of a module may be anything where they do not agree at all;
    loss and gradients together may not.

    Gradients jump where a value crosses a threshold, such as ReLU's. By rounding it does so in one run or in the other,
    or by chance in none, and then nothing is known of that noise: they may be off by what `MARGIN` roundings of
    bfloat16 explain, whatever the dtype. What a dtype flushes or overflows is off by more. Steps by such gradients move
    the losses behind them: of that way as much may be off, beside the resolution of bfloat16.

    Args:
        dtype: The low precision.
        noises: Distances of runs with neighbouring seeds, and of the same run from itself.
        moved: How far steps move the losses, relative to their norm.
    """
    digits = 2.0 ** -FORMATS[dtype].bits
    finest = {"forward": digits, "backward": max(RESOLUTION, digits)}
    least = {direction: min(LARGEST_TOLERANCE, MARGIN * rounding) for direction, rounding in finest.items()}
    values: dict[Place, float] = {}
    for error in (error for noise in noises for error in noise.values if math.isfinite(error.error)):
        before = values.get(place_of(error), least[error.direction])
        values[place_of(error)] = max(before, MARGIN * error.error)
    least_loss = min(LARGEST_TOLERANCE, RESOLUTION + least["backward"] * moved)
    return Tolerance(
        max(_explained(noise.loss, least_loss) for noise in noises),
        max(_explained(noise.gradients, least["backward"]) for noise in noises),
        values,
    )


def _explained(noise: float, least: float) -> float:
    """Return what noise explains of one number; where a run fails by rounding alone, that explains nothing."""
    return min(LARGEST_TOLERANCE, max(least, MARGIN * noise)) if math.isfinite(noise) else least
