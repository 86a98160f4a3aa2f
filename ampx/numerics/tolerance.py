"""How far a run in low precision may be from float32: by what rounding alone does to the same run, measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ampx.formats import FORMATS

from .compare import MARGIN, ModuleError, bound

# Gradients that are further off than this are of another direction, whatever rounding explains.
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
        values: Of outputs of modules and the gradients of these, in order of execution.
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
        values: By place, what a value of a module may be off by.
        elsewhere: What other values may be off by; None for their `ModuleError.bound`.
    """

    loss: float
    gradients: float
    values: Mapping[Place, float] = field(default_factory=dict)
    elsewhere: float | None = None

    def of(self, error: ModuleError) -> float:
        """Return what a value may be off by."""
        return self.values.get(place_of(error), error.bound if self.elsewhere is None else self.elsewhere)

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
                return f"{what} off by {percent(error)}, tolerance {percent(tolerance)}"
        return ""

    def _worst(self, errors: Iterable[ModuleError]) -> list[ModuleError]:
        """Return the value that is too far off by the largest factor; nothing of no values."""
        return sorted(errors, key=lambda entry: entry.error / self.of(entry))[-1:]


def _named(error: ModuleError) -> str:
    what = "the output" if error.direction == "forward" else "the gradient of the output"
    return f"{what} of {repr(error.module) if error.module else 'the model'} is"


def percent(number: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{float(f'{100 * number:.2g}'):g} %"


def uniform(tolerance: float) -> Tolerance:
    """Return the tolerance of a number that the user passed: single values may be off by a quarter at least.

    Small gradients have little weight in the error of all together, and may be off by some percent where rounding moves
    a threshold such as ReLU's. What is off by more is something else.
    """
    return Tolerance(tolerance, tolerance, elsewhere=max(tolerance, LARGEST_TOLERANCE))


def by_count(dtype: str, roundings: int) -> Tolerance:
    """Return the tolerance of so many roundings in a row, where their effect cannot be measured."""
    return uniform(min(LARGEST_TOLERANCE, bound(dtype, roundings)))


def by_rounding(dtype: str, noises: Iterable[Distance]) -> Tolerance:
    """Return the tolerance that runs in float32 explain which differ by no more than rounding.

    What is as far off as `MARGIN` times the largest of these is more than rounding. A value of a module has to be
    explained by the number of roundings behind it, too: rounding between modules that spoils a value is no noise.
    The gradient of a single output may be off by a quarter, as in `uniform`: one that is small beside others loses
    digits to the smallest numbers of the dtype, whatever the loss scale, and counts with all gradients together.

    Args:
        dtype: The low precision.
        noises: Of a run that rounds what modules take and return to the digits of the dtype, and of a repeated run.
    """
    digits = 2.0 ** -FORMATS[dtype].bits
    noises = list(noises)
    values: dict[Place, float] = {}
    for error in (error for noise in noises for error in noise.values):
        limit = min(error.bound, MARGIN * max(error.error, digits))
        limit = max(limit, LARGEST_TOLERANCE) if error.direction == "backward" else limit
        values[place_of(error)] = max(limit, values.get(place_of(error), 0.0))
    loss = _explained((noise.loss for noise in noises), RESOLUTION)
    gradients = _explained((noise.gradients for noise in noises), max(RESOLUTION, MARGIN * digits))
    return Tolerance(loss, gradients, values=values)


def _explained(errors: Iterable[float], least: float) -> float:
    """Return what rounding explains of one number; where a run fails by rounding alone, that explains nothing."""
    largest = max((error for error in errors if math.isfinite(error)), default=0.0)
    return min(LARGEST_TOLERANCE, max(least, MARGIN * largest))
