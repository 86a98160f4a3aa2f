"""What a region of `Probe.watch` notes: readings whose numbers are still on the device, and samples of values."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from ampx.backend import Array
from ampx.formats import stride

from .probe import Direction, Reading, Stats, Watching

# Of one tensor: its elements, and what `Log.read` makes the numbers of NUMBERS of.
Reduced: TypeAlias = tuple[int, Any]
# Brings the second halves of some of them to the host: of each the numbers of NUMBERS.
Read: TypeAlias = Callable[[Sequence[Any]], Sequence[Sequence[float]]]
# What a backend reduces a tensor to. Without any such element, `smallest` and `lowest` are infinite.
NUMBERS: Final = ("nonfinite", "nan", "zeros", "largest", "smallest", "lowest", "flushed", "overflowed")


@dataclass(eq=False)
class Entry:
    """A reading whose numbers are still on the device; several tensors are one value.

    Attributes:
        sampled: Of each tensor of the value, the elements that belong to its sample; () where none are asked for.
        value: Every tensor, reduced.
        inputs: Every tensor that was received, reduced.
        samples: Elements of the tensors, on the device, by their places in the value.
        dtype: Of the first tensor; "" for what never came.
    """

    module: str
    kind: str
    operation: str
    direction: Direction
    call: int
    sampled: tuple[slice, ...] = ()
    value: list[Reduced] = field(default_factory=list)
    inputs: list[Reduced] = field(default_factory=list)
    samples: dict[int, Any] = field(default_factory=dict)
    dtype: str = ""
    seconds: float | None = None
    place: str = ""

    def chosen(self, place: int, values: Any, elements: int) -> Any | None:
        """Return the elements of a flat tensor at a place of the value that belong to its sample; None for none."""
        sampled = self.sampled[place]
        return values[sampled] if sampled.start < elements else None


class Log:
    """Readings in order of execution: the `Watch` of a backend."""

    def __init__(self, watching: Watching, read: Read, elements: Callable[[Sequence[Any]], Sequence[Array]]) -> None:
        """Start empty.

        Args:
            watching: What to look at.
            read: Brings reduced tensors to the host.
            elements: Brings samples to the host, as arrays of float32.
        """
        self.watching = watching
        self._read = read
        self._elements = elements
        self._entries: list[Entry] = []
        self._calls: Counter[tuple[str, str, Direction]] = Counter()
        self._lock = threading.Lock()

    def add(self, module: str, kind: str, operation: str, direction: Direction, sizes: Sequence[int] = ()) -> Entry:
        """Note the next call in a direction, and return where its values belong.

        Args:
            module: Name of the module.
            kind: Its class.
            operation: "" for a module.
            direction: Of the pass.
            sizes: Elements of each tensor of the value.
        """
        samples = self.watching.samples
        sampled = sample_slices(sizes, samples) if samples else ()
        with self._lock:
            key = module, operation, direction
            entry = Entry(module, kind, operation, direction, self._calls[key], sampled)
            self._calls[key] += 1
            self._entries.append(entry)
        return entry

    def timed(
        self, wait: Callable[[], Any], forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, float | None]:
        """Return what the call of a module returns, and how long it took, where that was asked for.

        Args:
            wait: Waits for the device.
            forward: Calls the module.
            inputs: Its arguments.
            options: Its keyword arguments.
        """
        if not self.watching.times:
            return forward(*inputs, **options), None
        wait()
        begin = time.perf_counter()
        output = forward(*inputs, **options)
        wait()
        return output, time.perf_counter() - begin

    def readings(self) -> list[Reading]:
        """Return what was seen so far. Sync: one a device."""
        entries = [entry for entry in self._entries if entry.dtype]
        stats = iter(read_stats([part for entry in entries for part in (entry.value, entry.inputs)], self._read))
        samples = iter(self._samples(entries))
        return [
            Reading(
                *(entry.module, entry.kind, entry.operation, entry.direction, entry.call, entry.dtype),
                *(next(stats), next(stats), next(samples), entry.seconds, entry.place),
            )
            for entry in entries
        ]

    def _samples(self, entries: Sequence[Entry]) -> list[Array | None]:
        if not self.watching.samples:
            return [None] * len(entries)
        import numpy as np

        parts = [[part for _, part in sorted(entry.samples.items())] for entry in entries]
        arrays = iter(self._elements([part for own in parts for part in own]))
        return [np.concatenate([np.empty(0, np.float32), *(next(arrays) for _ in own)]) for own in parts]


class GradientLog:
    """The gradients of the outputs of one call: of each backward pass that comes by, one reading."""

    def __init__(self, log: Log, module: str, kind: str, operation: str = "", sizes: Sequence[int] = ()) -> None:
        """Start empty; for the arguments see `Log.add`."""
        self._add = partial(log.add, module, kind, operation, "backward", sizes)
        self._entry: Entry | None = None
        self._places: set[int] = set()
        self._lock = threading.Lock()

    def at(self, place: int) -> Entry:
        """Return where the gradient of the output at a place belongs, which has just come."""
        with self._lock:
            if self._entry is None or place in self._places:
                self._entry, self._places = self._add(), set()
            self._places.add(place)
            return self._entry


def read_stats(groups: Sequence[Sequence[Reduced]], read: Read) -> list[Stats]:
    """Return the numbers of each group of reduced tensors as those of one value. Sync: one a device."""
    numbers = iter(read([reduced for group in groups for _, reduced in group]))
    return [combined([(elements, next(numbers)) for elements, _ in group]) for group in groups]


def combined(parts: Sequence[tuple[int, Sequence[float]]]) -> Stats:
    """Return the numbers of several tensors as those of one value: of each its elements, and `NUMBERS`."""
    if not parts:
        return Stats()
    columns = dict(zip(NUMBERS, zip(*(numbers for _, numbers in parts), strict=True), strict=True))
    lowest, smallest = min(columns["lowest"]), min(columns["smallest"])
    return Stats(
        elements=sum(elements for elements, _ in parts),
        largest=max(columns["largest"]),
        smallest=0.0 if smallest == float("inf") else smallest,
        lowest=0.0 if lowest == float("inf") else lowest,
        **{name: int(sum(columns[name])) for name in ("nonfinite", "nan", "zeros", "flushed", "overflowed")},
    )


def sample_slices(sizes: Sequence[int], samples: int) -> tuple[slice, ...]:
    """Return of each tensor of a value, flat, the elements that belong to the value's sample.

    Args:
        sizes: Elements of each tensor.
        samples: At most so many elements are in the sample, of all tensors together.
    """
    step, before, slices = stride(sum(sizes), samples), 0, []
    for size in sizes:
        slices.append(slice(-before % step, None, step))
        before += size
    return tuple(slices)
