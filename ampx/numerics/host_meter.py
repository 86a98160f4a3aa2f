"""The meter where the loss scale lives on the host: a sample of every parameter, in every hundredth step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampx.backend import Array
from ampx.protocol import Member

from .meter import Meter, count, report


@dataclass(frozen=True)
class Sampled:
    """Elements of one parameter, as `ampx.numerics.meter.count` takes them."""

    name: str
    dtype: str
    values: Array
    gradient: Array | None


class HostMeter:
    """Counts the steps of one optimizer, and keeps the last sample."""

    def __init__(self, compute: str) -> None:
        """Begin with no step of this compute dtype."""
        self._compute = compute
        self._steps = 0
        self._last: Meter | None = None

    def step(self, member: Member, run: Callable[[], Any], look: Callable[[], Sequence[Sampled]]) -> Any:
        """Run a step, and meter it if it is its turn and it updates.

        Args:
            member: What the optimizer is in its group.
            run: Makes the step.
            look: Returns a sample of every parameter and of its gradient as it is now.
        """
        self._steps += 1
        every = member.group.meter_every
        if not every or self._steps % every or not member.group.enabled or member.stage not in ("scaled", "unscaled"):
            return run()
        factor = float(member.factor) if len(member.factors) == 1 else 1.0
        times = factor if member.stage == "unscaled" else 1.0  # somebody has divided the gradients
        before = look()
        result = run()
        if member.result is not None and member.result.applied:
            entries = [
                count(
                    *(entry.name, entry.dtype, entry.values, updated.values),
                    None if entry.gradient is None else entry.gradient * np.float32(times),
                    self._compute,
                )
                for entry, updated in zip(before, look(), strict=True)
            ]
            self._last = Meter(self._steps, self._compute, factor, tuple(entries))
            report(member.group, self._steps, self._last.lost, self._last.flushed, self._last.headroom)
        return result

    def note(self, meter: Meter) -> None:
        """Keep what another meter of the same optimizer counted."""
        self._last = meter

    def last(self) -> Meter | None:
        """Return what the last update that was looked at did; None before the first."""
        return self._last
