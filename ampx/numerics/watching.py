"""What a region of `Probe.watch` notes: readings whose numbers are still on the device, and samples of values.

A backend says in a table what its `Tensors` are; `Watcher` reads what its modules and operations return.
"""

from __future__ import annotations

import abc
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from ampx.backend import Array
from ampx.formats import stride
from ampx.modules import Names, present_name

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
        behind: Of a gradient, the number of the value that it belongs to, in order of execution, from 1.
        value: Every tensor, reduced.
        inputs: Every tensor that was received, reduced.
        samples: Elements of the tensors, on the device, by their places in the value.
        dtype: Of the first tensor; "" for what never came.
    """

    module: str
    kind: str
    operation: str
    direction: Direction
    sampled: tuple[slice, ...] = ()
    behind: int = 0
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
        self._lock = threading.Lock()
        self.numbers = itertools.count(1)  # of values whose gradients are read

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
        entry = Entry(module, kind, operation, direction, sampled)
        with self._lock:
            self._entries.append(entry)
        return entry

    def sort(self) -> None:
        """Sort gradients that were noted in a row: that of the value that was computed last comes first."""
        runs = itertools.groupby(self._entries, key=lambda entry: entry.behind > 0)
        self._entries = [entry for _, run in runs for entry in sorted(run, key=lambda entry: -entry.behind)]

    def readings(self) -> list[Reading]:
        """Return what was seen so far, by the names that modules have now. Sync: one a device."""
        entries = [entry for entry in self._entries if entry.dtype]
        for entry in entries:
            entry.module = present_name(entry.module)
        stats = iter(read_stats([part for entry in entries for part in (entry.value, entry.inputs)], self._read))
        samples = iter(self._samples(entries))
        calls = self._calls()
        return [
            Reading(
                *(entry.module, entry.kind, entry.operation, entry.direction, calls[entry], entry.dtype),
                *(next(stats), next(stats), next(samples), entry.seconds, entry.place),
            )
            for entry in entries
        ]

    def _calls(self) -> dict[Entry, int]:
        """Return which call of its module or operation, in its direction, each entry is."""
        counts: Counter[tuple[str, str, Direction]] = Counter()
        calls = {}
        for entry in self._entries:
            key = entry.module, entry.operation, entry.direction
            calls[entry] = counts[key]
            counts[key] += 1
        return calls

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
        self._number = next(log.numbers)
        self._entry: Entry | None = None
        self._places: set[int] = set()
        self._lock = threading.Lock()

    def at(self, place: int) -> Entry:
        """Return where the gradient of the output at a place belongs, which has just come."""
        with self._lock:
            if self._entry is None or place in self._places:
                self._entry, self._places = self._add(), set()
                self._entry.behind = self._number
            self._places.add(place)
            return self._entry


# -- over the tensors of a framework -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensors:
    """The tensors of a framework, as a watch reads them.

    Attributes:
        unseen: Returns a region for what a watch itself computes: no graph has it, and no watch reads it.
        floating: Lists the floating tensors of a tree that hold values.
        dtype: Returns the name of a tensor's dtype.
        held: Returns what holds a tensor's elements: of a sparse one its values.
        size: Returns how many elements that has.
        reduce: Reduces it for a dtype that is watched to one vector, on its device.
        flat: Returns its elements in one dimension.
        sample: Returns a copy of some of them in float32.
        device: Returns where a vector or a sample is.
        rows: Brings the vectors of one device to the host: of each the numbers of `NUMBERS`.
        arrays: Brings the samples of one device to the host.
    """

    unseen: Callable[[], AbstractContextManager[Any]]
    floating: Callable[[Any], Iterable[Any]]
    dtype: Callable[[Any], str]
    held: Callable[[Any], Any]
    size: Callable[[Any], int]
    reduce: Callable[[Any, str], Any]
    flat: Callable[[Any], Any]
    sample: Callable[[Any], Any]
    device: Callable[[Any], Hashable]
    rows: Callable[[Sequence[Any]], Sequence[Sequence[float]]]
    arrays: Callable[[Sequence[Any]], Sequence[Array]]

    def sizes(self, tensors: Iterable[Any]) -> list[int]:
        """Return how many elements tensors have."""
        with self.unseen():
            return [self.size(self.held(tensor)) for tensor in tensors]

    def reduced(self, tensors: Iterable[Any], dtype: str) -> list[Reduced]:
        """Reduce the tensors that have elements, on their devices."""
        with self.unseen():
            held = ((self.size(values), values) for values in map(self.held, tensors))
            return [(elements, self.reduce(values, dtype)) for elements, values in held if elements]

    def stats(self, tensors: Mapping[str, Any], dtype: str) -> dict[str, Stats]:
        """Return the numbers of tensors by name. Sync: one a device."""
        groups = [self.reduced(self.floating(tensor), dtype) for tensor in tensors.values()]
        return dict(zip(tensors, read_stats(groups, self.read), strict=True))

    def read(self, vectors: Sequence[Any]) -> Sequence[Sequence[float]]:
        """Bring reduced tensors to the host. Sync: one a device."""
        return self._by_device(vectors, self.rows)

    def read_samples(self, samples: Sequence[Any]) -> Sequence[Array]:
        """Bring samples to the host. Sync: one a device."""
        return self._by_device(samples, self.arrays)

    def _by_device(self, tensors: Sequence[Any], bring: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
        held: dict[Hashable, list[Any]] = {}
        for tensor in tensors:
            held.setdefault(self.device(tensor), []).append(tensor)
        with self.unseen():
            brought = {device: iter(bring(own)) for device, own in held.items()}
        return [next(brought[self.device(tensor)]) for tensor in tensors]


# Name and class of a module.
Where: TypeAlias = tuple[str, str]


class _Thread(threading.local):
    """The modules that run in a thread, the innermost last."""

    running: tuple[Where, ...] = ()


class Watcher(abc.ABC):
    """Reads what modules and operations return: an interceptor of the calls of modules, and what `watch` yields."""

    def __init__(self, tensors: Tensors, watching: Watching, names: Names | None = None) -> None:
        """Start empty; without names, a subclass calls `read` for the modules that it has names of."""
        self.tensors, self.watching, self._names = tensors, watching, names
        self.log = Log(watching, tensors.read, tensors.read_samples)
        self._thread = _Thread()

    def readings(self) -> list[Reading]:
        """Return what was seen so far, in order of execution. Sync: one a device."""
        return self.log.readings()

    @contextmanager
    def looking(
        self,
        regions: Iterable[AbstractContextManager[Any]],
        operations: Callable[[Any], AbstractContextManager[Any]],
    ) -> Iterator[Watcher]:
        """Return a region in which modules are read, and operations where they are asked for: `Probe.watch`.

        Args:
            regions: In which calls of modules come by.
            operations: Returns a region in which a watcher sees operations.
        """
        if self._names is not None:
            self._names.check(self.watching.modules, "watch")
        with ExitStack() as stack:
            for region in regions:
                stack.enter_context(region)
            if self.watching.operations:
                stack.enter_context(operations(self))
            yield self

    @abc.abstractmethod
    def tapped(self, value: Any, where: Where) -> Any:
        """Return a value whose gradients are read when they come: see `listeners`."""

    def wait(self) -> None:
        """Wait for the devices, of a framework that runs ahead of them."""

    @property
    def where(self) -> Where:
        """The innermost module that runs in this thread; empty words outside of all."""
        return self._thread.running[-1] if self._thread.running else ("", "")

    def call(self, module: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a module, and read its output."""
        name = None if self._names is None else self._names.of(module)
        if name is None:
            return forward(*inputs, **options)
        running, where = self._thread.running, (name, type(module).__name__)
        self._thread.running = (*running, where)
        try:
            return self.read(where, forward, inputs, options)
        finally:
            self._thread.running = running

    def read(self, where: Where, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Read what a module returns, and have the gradient of it read when it comes."""
        if not self.watching.watches(where[0]):
            return forward(*inputs, **options)
        received = self.reduced((inputs, options))  # before the module can change them in place
        began = self._now()
        output = forward(*inputs, **options)
        seconds = self._now() - began
        entry = self.note(where, "", "forward", output, received)
        if entry is None:
            return output
        entry.seconds = seconds if self.watching.times else None
        return self.tapped(output, where)

    def _now(self) -> float:
        """Return the time at which the devices are done, where calls are timed."""
        if not self.watching.times:
            return 0.0
        self.wait()
        return time.perf_counter()

    def note(
        self,
        where: Where,
        operation: str,
        direction: Direction,
        value: Any,
        inputs: list[Reduced],
        line: str = "",
    ) -> Entry | None:
        """Note what a module or operation returned of what it received; None where that has no floating tensors."""
        tensors = list(self.tensors.floating(value))
        if not tensors:
            return None
        entry = self.log.add(*where, operation, direction, self._sizes(tensors))
        entry.inputs, entry.place = inputs, line
        self._take(entry, tensors)
        return entry

    def listeners(
        self, where: Where, tensors: Sequence[Any], operation: str = "", line: str = ""
    ) -> list[Callable[[Any], None]]:
        """Return what is called with the gradient of each tensor of a value; those of one pass are one reading."""
        gradients = GradientLog(self.log, *where, operation, self._sizes(tensors))

        def listener(place: int) -> Callable[[Any], None]:
            def listen(gradient: Any) -> None:
                entry = gradients.at(place)
                entry.place = line
                self._take(entry, [gradient], place)

            return listen

        return list(map(listener, range(len(tensors))))

    def reduced(self, tree: Any) -> list[Reduced]:
        """Reduce the floating tensors of a tree, on their devices."""
        return self.tensors.reduced(self.tensors.floating(tree), self.watching.dtype)

    def _sizes(self, tensors: Sequence[Any]) -> Sequence[int]:
        return self.tensors.sizes(tensors) if self.watching.samples else ()

    def _take(self, entry: Entry, tensors: Sequence[Any], first: int = 0) -> None:
        """Reduce tensors of a value, and keep what belongs to its sample; the first has a place in the value."""
        own = self.tensors
        entry.dtype = entry.dtype or own.dtype(tensors[0])
        entry.value += own.reduced(tensors, self.watching.dtype)
        if entry.sampled:
            with own.unseen():
                for place, held in enumerate(map(own.held, tensors), first):
                    sample = entry.chosen(place, own.flat(held), own.size(held))
                    if sample is not None:
                        entry.samples[place] = own.sample(sample)


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
    step, before, slices = stride(sum(sizes), samples, *sizes), 0, []
    for size in sizes:
        slices.append(slice(-before % step, None, step))
        before += size
    return tuple(slices)
