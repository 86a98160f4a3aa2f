"""What cures a failing batch: changes are tried, one after another, before any is advised."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ampx.modules import outer_name

from .batch import Refusal, Seen
from .causes import Fault, Kind
from .compare import relative_error
from .places import WRONG, first_failing, first_wrong, key_of
from .probe import Reading
from .tolerance import percent
from .tune import inside

# So many sets of modules are tried; each takes a run.
TRIES: Final = 4
# Of these precision is the cause, unless float32 fails, too; those that a wider range may cure come first.
RANGE: Final[tuple[Kind, ...]] = ("overflow", "sum", "mask", "epsilon", "logarithm", "division", "flush")
PRECISION: Final[tuple[Kind, ...]] = (*RANGE, "digits", "error")


@dataclass(frozen=True)
class Change:
    """A change that may cure a batch.

    Attributes:
        float32: Names of modules that are kept in float32.
        scale: The loss scale; None for that of the batch.
        dtype: Another dtype; None for the same.
    """

    float32: tuple[str, ...] = ()
    scale: float | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        """Name the change."""
        *rest, last = map(repr, self.float32 or ("",))
        names = f"{', '.join(rest)} and {last}" if rest else last if self.float32 else ""
        words = [f"with module{'s' if len(self.float32) > 1 else ''} {names} in float32"] if names else []
        words += [] if self.dtype is None else [f"in {self.dtype}"]
        words += [] if self.scale is None else [f"with a loss scale of {self.scale:g}"]
        return ", ".join(words)


@dataclass(frozen=True)
class Experiment:
    """A failing batch, run again with a change.

    Attributes:
        change: In words.
        loss: The loss then.
        error: How far that is from float32's loss, relative to it.
        finite: The loss and all gradients are finite.
        cures: They are, and what is computed agrees with float32.
        raised: What was raised then; "" for nothing.
    """

    change: str
    loss: float
    error: float
    finite: bool
    cures: bool
    raised: str = ""

    def __str__(self) -> str:
        """Return what came out, in a line."""
        if self.raised:
            return f"{self.change}: {self.raised}"
        off = f", {percent(self.error)} from float32's" if math.isfinite(self.error) else ""
        finite = "finite" if self.finite else "gradients are not finite" if math.isfinite(self.loss) else "not finite"
        return f"{self.change}: loss {self.loss:.4g}, {finite}{off}"


# Runs the batch with a change; it is passed the names of all modules, too.
Again: TypeAlias = Callable[[Change, Sequence[str]], "Seen | Refusal"]


class Search:
    """The search for the smallest set of modules that cures a batch when they are kept in float32."""

    def __init__(
        self, fault: Fault, reference: Callable[[], Seen], dtype: str, again: Again, scale: float | None = None
    ) -> None:
        """Start with nothing tried.

        Args:
            fault: What is suspected.
            reference: Returns the batch in float32, which a change is compared with. In a script it is in float32 in
                all steps, as `again` changes all of them.
            dtype: The precision that fails.
            again: Runs the batch in that precision with a change.
            scale: The loss scale to try with; None for that of the batch.
        """
        self.experiments: list[Experiment] = []
        self.producer = ""  # which loses the digits that are missed at the place: with it in float32 the loss is right
        self._lost_before = False  # in float32 digits cancel at the place as well
        self._fault, self._dtype, self._again, self._scale = fault, dtype, again, scale
        self._reference = functools.cache(reference)

    def cure(self, settled: Seen | None = None) -> Change | None:
        """Return the change that cures the batch; None where none of those tried does, or nothing is to be cured.

        Args:
            settled: The batch with a loss scale of 1, where that was tried and is finite.
        """
        if self._fault.kind == "loss scale" and settled is not None:
            self.experiments.append(self._judged(Change(scale=1.0), settled))
        return self._in_float32() if self._fault.kind in PRECISION else None

    def _in_float32(self) -> Change | None:
        """Keep more and more modules in float32."""
        kept: tuple[str, ...] = ()
        readings, position = self._fault.readings, self._fault.position
        while position is not None and len(self.experiments) < TRIES:
            module = _candidate(readings, position, kept)
            if module is None:
                break
            kept = (*kept, module)
            seen = self._attempt(Change(kept, self._scale))
            if self._lost_before and not self.producer and self.experiments[-1].error <= WRONG:
                self.producer = module
            if self.experiments[-1].cures:
                return Change(self._needed(kept), self._scale)
            if seen is not None:
                readings, position = seen.readings, self._failing(seen)
                first = self._fault.cancels and len(kept) == 1
                self._lost_before |= first and _fails_forward_in(kept[0], readings, position)
        wider = Change(scale=1.0, dtype="bfloat16")
        if self._dtype == "float16" and self._fault.kind in RANGE:
            self._attempt(wider)
            return wider if self.experiments[-1].cures else None
        return None

    def _needed(self, kept: tuple[str, ...]) -> tuple[str, ...]:
        """Leave out each module without which the batch is cured as well; the last is needed, as was seen."""
        for module in kept[:-1]:
            fewer = tuple(name for name in kept if name != module)
            self._attempt(Change(fewer, self._scale))
            kept = fewer if self.experiments[-1].cures else kept
        return kept

    def _attempt(self, change: Change) -> Seen | None:
        """Run the batch with a change, and note what came out."""
        seen = self._again(change, [entry.module for entry in self._reference().readings])
        if isinstance(seen, Refusal):
            self.experiments.append(Experiment(str(change), math.nan, math.nan, False, False, seen.message))
            return None
        self.experiments.append(self._judged(change, seen))
        return seen

    def _judged(self, change: Change, seen: Seen) -> Experiment:
        """Return what came out of a change."""
        loss = seen.replayed.loss
        error = relative_error(np.array([loss]), np.array([self._reference().replayed.loss]))
        agrees = seen.finite and error <= WRONG and (not self._fault.stays_finite or self._failing(seen) is None)
        return Experiment(str(change), loss, error, seen.finite, agrees)

    def _failing(self, seen: Seen) -> int | None:
        """Return where a run fails, or where it is wrong though all is finite."""
        exact = {key_of(entry): entry for entry in self._reference().readings}
        return first_wrong(seen.readings, exact, self._dtype) if seen.finite else first_failing(seen.readings, exact)


def _candidate(readings: Sequence[Reading], position: int, kept: Sequence[str]) -> str | None:
    """Return the module to keep in float32 beside others: that of the place.

    Where that is in float32 already, what it receives is wrong: then the module that ran before it, or else the one
    around it. None for none.
    """
    module = readings[position].module
    if module and not _is_part(module, kept):
        return module
    around = outer_name(module) if module else None
    return _before(readings[:position], (*kept, module)) or (around if around not in kept else None) or None


def _before(readings: Sequence[Reading], taken: Sequence[str]) -> str | None:
    """Return the last module without modules inside that has returned, and is no part of others."""
    names = [entry.module for entry in readings if entry.direction == "forward" and not entry.operation]
    leaves = (name for name in reversed(names) if name and not any(inside(other, name) for other in names))
    return next((name for name in leaves if not _is_part(name, taken)), None)


def _fails_forward_in(module: str, readings: Sequence[Reading], position: int | None) -> bool:
    entry = None if position is None else readings[position]
    return entry is not None and entry.direction == "forward" and _is_part(entry.module, (module,))


def _is_part(name: str, modules: Sequence[str]) -> bool:
    return any(module and (name == module or inside(name, module)) for module in modules)
