"""How long something takes that may take much less than a clock can tell."""

from __future__ import annotations

import time
from collections.abc import Callable
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
