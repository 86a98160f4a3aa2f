"""The meter: updates that round to nothing, gradients that flush to zero, and how far overflow is.

A backend passes `count` a sample of each parameter: the elements before and after an update, and those of its
gradient as it is scaled. Nothing here knows a framework.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from ampx.events import PrecisionLost, UpdateMetered
from ampx.formats import FORMATS
from ampx.protocol import ScaleGroup
from ampx.rooms import METER_EVERY, METER_SAMPLES

EVERY: Final = METER_EVERY
SAMPLES: Final = METER_SAMPLES
# Shares from which on an event is sent.
LOST: Final = 0.5
FLUSHED: Final = 0.1


@dataclass(frozen=True)
class ParameterMeter:
    """What one update did to the sampled elements of one parameter.

    Attributes:
        name: Name of the parameter.
        dtype: Dtype of the parameter that was updated: of the float32 copy, where there is one.
        sampled: How many elements were looked at.
        moved: How many have a gradient that is finite and not zero.
        unchanged: How many of these have the same value after the update as before.
        flushed: How many elements of the scaled gradient the compute dtype rounds to zero, though they are not zero.
        nonfinite: How many elements of the scaled gradient are inf or NaN.
        headroom: By how many bits the scaled gradient could grow before it is beyond the compute dtype's largest
            number; None where there is no gradient other than zero.
    """

    name: str
    dtype: str
    sampled: int
    moved: int
    unchanged: int
    flushed: int
    nonfinite: int
    headroom: float | None

    @property
    def lost(self) -> float:
        """Share of the elements with a gradient whose update rounded to nothing."""
        return self.unchanged / self.moved if self.moved else 0.0

    @property
    def flushed_share(self) -> float:
        """Share of the gradient elements other than zero that the compute dtype rounds to zero."""
        return self.flushed / self.moved if self.moved else 0.0


@dataclass(frozen=True)
class Meter:
    """What one update did to the sampled elements of every parameter.

    Attributes:
        step: The step, counted from 1.
        dtype: The compute dtype.
        scale: The loss scale of the gradients.
        parameters: One entry a parameter.
    """

    step: int
    dtype: str
    scale: float
    parameters: tuple[ParameterMeter, ...]

    @property
    def lost(self) -> float:
        """Share of the elements with a gradient whose update rounded to nothing."""
        moved = sum(parameter.moved for parameter in self.parameters)
        return sum(parameter.unchanged for parameter in self.parameters) / moved if moved else 0.0

    @property
    def flushed(self) -> float:
        """Share of the gradient elements other than zero that the compute dtype rounds to zero."""
        moved = sum(parameter.moved for parameter in self.parameters)
        return sum(parameter.flushed for parameter in self.parameters) / moved if moved else 0.0

    @property
    def headroom(self) -> float | None:
        """Bits from the largest gradient element to overflow; None where no gradient is other than zero."""
        return min((entry.headroom for entry in self.parameters if entry.headroom is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "lost": self.lost, "flushed": self.flushed, "headroom": self.headroom}


def report(group: ScaleGroup, step: int, lost: float, flushed: float, headroom: float | None) -> None:
    """Send `UpdateMetered` where a logger is attached, and `PrecisionLost` where an update lost too much.

    Args:
        group: The loss scale of the optimizer.
        step: The step that was metered.
        lost: `Meter.lost`.
        flushed: `Meter.flushed`.
        headroom: `Meter.headroom`.
    """
    state = group.states[0]
    place = group.framework, group.index, 0, step
    numbers = state.scale, state.scale, state.consecutive_skips
    if group.observer is not None:  # somebody logs
        group.send(UpdateMetered(*place, *numbers, lost, flushed, headroom))
    if lost >= LOST or flushed >= FLUSHED:
        group.send(PrecisionLost(*place, *numbers, lost, flushed))


def count(name: str, dtype: str, before: Any, after: Any, gradient: Any, compute: str = "float16") -> ParameterMeter:
    """Count one parameter.

    Args:
        name: Name of the parameter.
        dtype: Dtype of the parameter that was updated.
        before: Sampled elements before the update, in any dtype that NumPy reads, or as float32.
        after: The same elements after it.
        gradient: The same elements of the gradient, scaled; None where the parameter has none.
        compute: The compute dtype, of `FORMATS`.
    """
    import numpy as np  # a step that is not metered does not wait for it

    old, new = np.asarray(before).reshape(-1), np.asarray(after).reshape(-1)
    if gradient is None:
        return ParameterMeter(name, dtype, old.size, 0, 0, 0, 0, None)
    magnitude = np.abs(np.asarray(gradient).astype(np.float32, copy=False).reshape(-1))
    finite = np.isfinite(magnitude)
    moved = finite & (magnitude != 0)
    largest, form = float(magnitude.max(where=finite, initial=0.0)), FORMATS[compute]
    return ParameterMeter(
        name,
        dtype,
        old.size,
        int(moved.sum()),
        int((moved & (old == new)).sum()),
        int((moved & (magnitude <= form.flushes_to)).sum()),
        int((~finite).sum()),
        math.log2(form.largest) - math.log2(largest) if largest else None,
    )
