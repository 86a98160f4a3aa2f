"""The meter where the loss scale lives on the host: a sample of every parameter, in every hundredth step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ampx.backend import Array
from ampx.protocol import StepObserver

from .meter import Meter, ParameterMeter, count, report

_NOTHING: Final = np.empty(0, np.float32)


@dataclass(frozen=True)
class Sampled:
    """Elements of one parameter, as `ampx.numerics.meter.count` takes them."""

    name: str
    dtype: str
    values: Array
    gradient: Array | None


@dataclass(frozen=True)
class Update:
    """An update that was looked at.

    Attributes:
        step: The step, counted from 1.
        compute: The compute dtype.
        scale: The loss scale of the gradients.
        times: What makes the sampled gradients scaled ones again.
        before: A sample of every parameter and of its gradient, before the update.
        after: A sample of every parameter, after it.
    """

    step: int
    compute: str
    scale: float
    times: float
    before: Sequence[Sampled]
    after: Sequence[Sampled]

    def total(self) -> ParameterMeter:
        """Count all parameters that have a gradient in one go, as if they were one."""
        pairs = zip(self.before, self.after, strict=True)
        moving = [
            (entry.values, updated.values, entry.gradient) for entry, updated in pairs if entry.gradient is not None
        ]
        columns = zip(*moving, strict=True) if moving else ((), (), ())
        return self._count("", "", *(np.concatenate([_NOTHING, *map(_flat, column)]) for column in columns))

    def meter(self, names: Mapping[str, str]) -> Meter:
        """Return what the update did to every parameter, called by these names or else those that were sampled."""
        entries = [
            self._count(names.get(entry.name, entry.name), entry.dtype, entry.values, updated.values, entry.gradient)
            for entry, updated in zip(self.before, self.after, strict=True)
        ]
        return Meter(self.step, self.compute, self.scale, tuple(entries))

    def _count(self, name: str, dtype: str, before: Array, after: Array, gradient: Array | None) -> ParameterMeter:
        scaled = None if gradient is None else gradient * np.float32(self.times)
        return count(name, dtype, before, after, scaled, self.compute)


class HostMeter(StepObserver):
    """Counts the steps of one optimizer, and keeps the last sample."""

    def __init__(self, compute: str, look: Callable[[Any, bool], Sequence[Sampled]]) -> None:
        """Begin with no step.

        Args:
            compute: The compute dtype.
            look: Takes the wrapped optimizer; returns a sample of every parameter as it is now, and of its gradient if
                the other argument says so.
        """
        self._compute = compute
        self._look = look
        self._steps = 0
        # Of the running step, if it is measured: loss scale, the factor that rescales gradients, samples.
        self._before: tuple[float, float, Sequence[Sampled]] = (1.0, 1.0, ())
        # A meter, or its parts until it is asked for.
        self._last: Update | Meter | None = None

    def before(self, optimizer: Any) -> bool:
        """Count a step; sample it if it is its turn and there are scaled gradients to step with."""
        self._steps += 1
        member = optimizer.ampx_member
        every = member.group.meter_every
        if not every or self._steps % every or not member.group.enabled or member.stage not in ("scaled", "unscaled"):
            return False
        factor = float(member.factor) if len(member.factors) == 1 else 1.0
        times = factor if member.stage == "unscaled" else 1.0  # somebody has divided the gradients
        self._before = (factor, times, self._look(optimizer, True))
        return True

    def after(self, optimizer: Any, finite: Mapping[int, Any]) -> None:
        """Sample it again if it updated, and report."""
        (factor, times, before), self._before = self._before, (1.0, 1.0, ())
        if all(finite.values()):
            update = Update(self._steps, self._compute, factor, times, before, self._look(optimizer, False))
            self._last = update
            total = update.total()
            report(optimizer.ampx_member.group, self._steps, total.lost, total.flushed_share, total.headroom)

    def note(self, meter: Meter) -> None:
        """Keep what another meter of the same optimizer counted."""
        self._last = meter

    def last(self, names: Callable[[], Mapping[str, str]] = dict) -> Meter | None:
        """Return what the last update that was looked at did; None before the first.

        Args:
            names: Returns what parameters are called, by the names that were sampled; called once an update.
        """
        if isinstance(self._last, Update):
            self._last = self._last.meter(names())
        return self._last


def _flat(values: Any) -> Array:
    return np.asarray(values).reshape(-1).astype(np.float32, copy=False)
