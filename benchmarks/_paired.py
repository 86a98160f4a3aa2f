"""Time two ways of doing the same, in turn, and describe the ratio."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

from _memory import peak

Item = TypeVar("Item")

shortest = bool(os.environ.get("TINY"))
"""Whether a run is only to show that it runs, in this process and in those that it starts."""


def limited(items: Iterable[Item]) -> list[Item]:
    """Return the items, or the first alone where a run is only to show that it runs."""
    return list(items)[: 1 if shortest else None]


@dataclass(frozen=True)
class Ratio:
    """What the pairs say: medians in seconds, the median ratio A/B and where the middle half of the ratios lies.

    `peak_a` and `peak_b` are what a call takes of memory beyond what is held between calls, in MiB.
    """

    median_a: float
    median_b: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pairs: int
    peak_a: float | None
    peak_b: float | None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


def paired(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    pairs: int,
    repeat: int = 1,
    warmup: int = 5,
    before_a: Callable[[], object] | None = None,
    before_b: Callable[[], object] | None = None,
) -> Ratio:
    """Time `a` and `b` in turn; the order changes from pair to pair, so that a drift favours neither.

    Args:
        a: The one under test.
        b: What it is compared with.
        pairs: Number of pairs.
        repeat: Calls in one timing, for short calls.
        warmup: Pairs that do not count.
        before_a: Runs before each timing of `a`, not timed.
        before_b: Likewise for `b`.
    """
    if shortest:
        pairs, repeat, warmup = 2, 1, 1  # a range needs two
    times_a: list[float] = []
    times_b: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(warmup + pairs):
            order = [(a, before_a, times_a), (b, before_b, times_b)]
            for function, before, times in order if number % 2 else reversed(order):
                if before is not None:
                    before()
                start = time.perf_counter()
                for _ in range(repeat):
                    function()
                elapsed = (time.perf_counter() - start) / repeat
                if number >= warmup:
                    times.append(elapsed)
    finally:
        gc.enable()
    ratios = sorted(x / y for x, y in zip(times_a, times_b, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = statistics.median(times_a), statistics.median(times_b), statistics.median(ratios)
    return Ratio(*medians, low, high, len(ratios), peak(a, before_a), peak(b, before_b))


def measure_each(
    measure: Callable[[str, bool], dict[str, object]],
    workloads: Iterable[str],
    quick: bool,
    advance: Callable[[], object],
) -> list[dict[str, object]]:
    """Measure each workload; `advance` is called after it."""
    rows = []
    for workload in limited(workloads):
        rows.append(measure(workload, quick))
        advance()
    return rows


def machine() -> dict[str, object]:
    """Describe the machine in the terms that matter for a timing."""
    name = ""
    try:
        with open("/proc/cpuinfo") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = platform.processor()
    return {"processor": name, "system": platform.platform(), "python": platform.python_version()}
