"""What a region of `Probe.watch` notes: names of modules, and readings whose numbers are still on the device."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias

from ampx.backend import CastPlan, module_patterns
from ampx.errors import UnsupportedOpError

from .probe import Direction, Reading, Stats, Watching

# Of one tensor: its elements, and what `Log.read` makes the numbers of NUMBERS of.
Reduced: TypeAlias = tuple[int, Any]
# What a backend reduces a tensor to. Without any such element, `smallest` and `lowest` are infinite.
NUMBERS: Final = ("nonfinite", "nan", "zeros", "largest", "smallest", "lowest", "flushed", "overflowed")
# Where somebody stands around a call, from the outside to the inside: what rounds the gradients of outputs, where a
# framework has no other way to round them before they are watched; what watches; what forces.
Rank: TypeAlias = Literal[0, 1, 2]
GRADIENTS: Final = 0
WATCHERS: Final = 1
FORCES: Final = 2


class Around(Protocol):
    """What stands around the calls of modules."""

    def call(self, module: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the call of a module returns, by calling `forward`."""


class Calls:
    """Who stands around the calls of a framework's modules, in all threads.

    Watchers stand outside of what forces modules, so that they see what it made of their outputs.
    """

    def __init__(self, install: Callable[[], None], uninstall: Callable[[], None]) -> None:
        """Start with nobody.

        Args:
            install: Has calls of modules go through `run`; called when the first comes.
            uninstall: Undoes it; called when the last has gone.
        """
        self._install, self._uninstall = install, uninstall
        self._installed = False
        self._entries: tuple[tuple[Rank, Around], ...] = ()
        self._lock = threading.Lock()

    @contextmanager
    def around(self, *entries: tuple[Rank, Around]) -> Iterator[None]:
        """Return a region in which some stand around the calls; of one rank, the last stands innermost."""
        self._change(lambda: self._entries + entries)
        try:
            yield
        finally:
            self._change(lambda: tuple(entry for entry in self._entries if entry not in entries))

    def _change(self, change: Callable[[], tuple[tuple[Rank, Around], ...]]) -> None:
        with self._lock:
            self._entries = tuple(sorted(change(), key=lambda entry: entry[0]))
            if bool(self._entries) is not self._installed:
                (self._install if self._entries else self._uninstall)()
                self._installed = bool(self._entries)

    def run(self, module: Any, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Call a module."""
        for _, entry in reversed(self._entries):
            forward = partial(_stand, entry, module, forward)
        return forward(*inputs, **options)


def _stand(entry: Around, module: Any, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return entry.call(module, forward, inputs, options)


class Names:
    """The names of modules: within a model, or within the outermost modules that are called."""

    def __init__(self, model: Any | None, named: Callable[[Any], Iterable[tuple[str, Any]]]) -> None:
        """Name the modules of a model; without one, name modules as they are called.

        Args:
            model: The model, or None.
            named: Lists the modules in a module with their names, itself included as "".
        """
        self._named = named
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # so that a number stays that of the same module
        self._open = model is None
        self._roots: Counter[str] = Counter()
        if model is not None:
            self._add(model, "")

    def of(self, module: Any) -> str | None:
        """Return the name of a module that is called; None where it is not part of the model."""
        name = self._names.get(id(module))
        if name is None and self._open:
            kind = type(module).__name__
            prefix = f"{kind}:" if self._roots else ""
            self._roots[kind] += 1
            self._add(module, prefix)
            name = self._names[id(module)]
        return name

    def _add(self, root: Any, prefix: str) -> None:
        for name, module in self._named(root):
            if id(module) not in self._names:
                self._kept.append(module)
                self._names[id(module)] = prefix + name

    def check(self, patterns: Iterable[str], call: str) -> None:
        """Raise for a pattern that matches no module, where the model is known.

        Raises:
            UnsupportedOpError: There is one.
        """
        if self._open:
            return
        check_patterns(call, patterns, list(self._names.values()))


def check_patterns(call: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise for a pattern that matches none of the names of a model's modules.

    Raises:
        UnsupportedOpError: There is one.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(map(repr, names[:8]))
            raise UnsupportedOpError(
                f"{call} got the pattern {pattern!r}, which matches no module of the model; accepted: patterns of "
                f"names such as {shown}. Correct it."
            )


def last_match(name: str, dtypes: Mapping[str, str]) -> str | None:
    """Return what the last pattern that matches a name stands for; None where none matches."""
    for pattern in reversed(list(dtypes)):
        if fnmatchcase(name, pattern):
            return dtypes[pattern]
    return None


@dataclass
class Entry:
    """A reading whose numbers are still on the device; several tensors are one value.

    Attributes:
        value: Every tensor, reduced.
        inputs: Every tensor that was received, reduced.
        samples: Elements of every tensor, on the device.
        dtype: Of the first tensor.
    """

    module: str
    kind: str
    operation: str
    direction: Direction
    call: int
    value: list[Reduced] = field(default_factory=list)
    inputs: list[Reduced] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    dtype: str = ""
    seconds: float | None = None
    place: str = ""


class Log:
    """Readings in order of execution: the `Watch` of a backend."""

    def __init__(
        self,
        watching: Watching,
        read: Callable[[Sequence[Any]], list[list[float]]],
        elements: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Start empty.

        Args:
            watching: What to look at.
            read: Brings reduced tensors to the host.
            elements: Brings samples to the host, as one array of float32.
        """
        self.watching = watching
        self._read = read
        self._elements = elements
        self._entries: list[Entry] = []
        self._calls: Counter[tuple[str, str, Direction]] = Counter()
        self._lock = threading.Lock()

    def add(self, module: str, kind: str, operation: str, direction: Direction) -> Entry:
        """Note the next call in a direction, and return where its values belong."""
        with self._lock:
            key = module, operation, direction
            entry = Entry(module, kind, operation, direction, self._calls[key])
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
        entries = [entry for entry in self._entries if entry.value]
        parts = [part for entry in entries for part in (*entry.value, *entry.inputs)]
        numbers = iter(self._read([reduced for _, reduced in parts]))
        result = []
        for entry in entries:
            value = combined([(elements, next(numbers)) for elements, _ in entry.value])
            inputs = combined([(elements, next(numbers)) for elements, _ in entry.inputs])
            sample = self._elements(entry.samples) if entry.samples else None
            result.append(
                Reading(
                    *(entry.module, entry.kind, entry.operation, entry.direction, entry.call, entry.dtype),
                    *(value, inputs, sample, entry.seconds, entry.place),
                )
            )
        return result


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


def stride(elements: int, samples: int) -> int:
    """Return the distance between the elements of a sample."""
    return max(1, -(-elements // samples))


def module_dtypes(plan: CastPlan) -> dict[str, str]:
    """Return the dtype of each pattern of modules in a plan, for `last_match`: deny outdoes allow."""
    denied = dict.fromkeys(module_patterns(plan.deny), "float32")
    allowed = [pattern for pattern in module_patterns(plan.allow) if pattern not in denied]
    return {**dict.fromkeys(allowed, str(plan.dtype)), **denied}
