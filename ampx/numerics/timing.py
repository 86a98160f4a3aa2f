"""How long something takes that may take much less than a clock can tell."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

SECONDS: Final = 0.02
MOST: Final = 100


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
