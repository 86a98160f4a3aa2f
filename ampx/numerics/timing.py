"""How long steps and modules take, and which of several choices is the fastest."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .forcing import inside
from .probe import Reading

SECONDS: Final = 0.02
MOST: Final = 100
# Below this a ratio of times is no difference.
ALIKE: Final = 0.02


def timed(compute: Callable[[], Any], wait: Callable[[], Any] = lambda: None) -> float:
    """Return the seconds of one call, of so many calls that they take at least `SECONDS`, and of `MOST` at most.

    Args:
        compute: What is timed.
        wait: Waits for the devices that it has given work to.
    """
    count, began = 0, time.perf_counter()
    while count < MOST and (not count or time.perf_counter() - began < SECONDS):
        compute()
        count += 1
    wait()
    return (time.perf_counter() - began) / count


def speed_in_words(ratios: Sequence[float]) -> str:
    """Return what the speed is, of its ratios to float32's in pairs of runs."""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "one pair of runs"
    return f"{statistics.median(ratios):.2f} times the speed of float32 ({spread})"


def busy() -> list[str]:
    """Return a sentence about other work on this machine, if there is enough of it to spoil what is timed.

    On a machine of two processors that was busy, steps of threads that wait for each other took ten times as long.
    """
    if not hasattr(os, "getloadavg"):
        return []
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load <= processors / 2:
        return []
    return [
        f"This machine had other work when the command began (a load of {load:.1f} on {processors} processors): "
        f"speeds may be far off. Repeat the command on a quiet machine."
    ]


def measured(clocks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return seconds by name, of clocks that take turns in changing order, after one time each that does not count."""
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for number in range(repeats + 1):
        for name in list(clocks)[:: -1 if number % 2 else 1]:
            seconds = clocks[name]()
            if number:
                times[name].append(seconds)
    return times


def slow_modules(low: Sequence[Sequence[Reading]], wide: Sequence[Sequence[Reading]]) -> dict[str, tuple[float, float]]:
    """Return the modules that take no less time in low precision than in float32, with both times in seconds.

    A module's time is the median of the runs; it is slow only where its best time in low precision is worse than its
    best in float32, too, so that a disturbance decides nothing.

    Args:
        low: Readings with times, of several runs in low precision.
        wide: Of as many in float32.
    """
    lows, wides = _times(low), _times(wide)
    return {
        name: (statistics.median(times), statistics.median(wides[name]))
        for name, times in lows.items()
        if name in wides
        and statistics.median(times) >= statistics.median(wides[name])
        and min(times) >= min(wides[name])
    }


def _times(runs: Sequence[Sequence[Reading]]) -> dict[str, list[float]]:
    """Return the seconds of each module that holds no other, one a run."""
    times: dict[str, list[float]] = {}
    for readings in runs:
        names = {entry.module for entry in readings}
        sums: dict[str, float] = {}
        for entry in readings:
            if entry.seconds is not None and not any(inside(other, entry.module) for other in names):
                sums[entry.module] = sums.get(entry.module, 0.0) + entry.seconds
        for name, seconds in sums.items():
            times.setdefault(name, []).append(seconds)
    return times


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """Return the name whose times are the shortest, of runs that alternated; of those without a difference the first.

    A difference is one beyond the spread: the median of the rounds says so, and at least three quarters of them do.

    Args:
        times: By name, one time a round, the preferred name first.
    """
    best = next(iter(times))
    for name, seconds in times.items():
        ratios = sorted(mine / other for mine, other in zip(times[best], seconds, strict=True))
        if statistics.median(ratios) > 1 + ALIKE and ratios[len(ratios) // 4] > 1:
            best = name
    return best


def is_undecided(times: Mapping[str, Sequence[float]]) -> bool:
    """Return whether float32 is preferred though something else was faster, because rounds differ too much.

    Args:
        times: As for `fastest`, with `"float32"`.
    """
    return fastest(times) == "float32" and best_speed(times)[0] > 1 + ALIKE


def best_speed(times: Mapping[str, Sequence[float]]) -> tuple[float, list[float]]:
    """Return the best speed of what is not float32, relative to it: the median of the rounds, and all."""
    others = [seconds for name, seconds in times.items() if name != "float32"]
    ratios = [[mine / other for mine, other in zip(times["float32"], seconds, strict=True)] for seconds in others]
    best = max(ratios, key=statistics.median)
    return statistics.median(best), best
