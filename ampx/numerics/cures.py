"""What cures a failing batch: changes are tried, one after another, before any is advised."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ampx.backend import MODULE
from ampx.formats import FORMATS
from ampx.modules import outer_name

from .batch import Refusal, Seen
from .causes import Fault, Kind, first_flushed, loss_is_wrong, lost_gradients
from .compare import Key, by_key, error_of, key_of, relative_error
from .forcing import inside, is_part
from .operations import family
from .places import WRONG, first_failing, first_wrong, is_low
from .probe import Reading
from .tolerance import percent

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
        operations: Names of operations that are kept in float32, wherever they run.
        scale: The loss scale; None for that of the batch.
        dtype: Another dtype; None for the same.
        rounded: Name of the only module that, with all inside it, takes and returns `bits` bits; "" for none.
        bits: Of the significands.
    """

    float32: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    scale: float | None = None
    dtype: str | None = None
    rounded: str = ""
    bits: int = 0

    @property
    def deny(self) -> tuple[str, ...]:
        """What is kept in float32, as entries of `deny` in a policy file."""
        return (*map(entry_in_every_model, dict.fromkeys(self.float32)), *self.operations)

    def __str__(self) -> str:
        """Name the change."""
        *rest, last = map(repr, self.float32 or ("",))
        names = f"{', '.join(rest)} and {last}" if rest else last if self.float32 else ""
        words = [f"with module{'s' if len(self.float32) > 1 else ''} {names} in float32"] if names else []
        words += [f"with operation {name!r} in float32" for name in self.operations]
        words += [] if self.dtype is None else [f"in {self.dtype}"]
        words += (
            [f"with inputs and outputs of module {self.rounded!r} rounded to {self.bits} bits"] if self.rounded else []
        )
        words += [] if self.scale is None else [f"at a loss scale of {self.scale:g}"]
        return ", ".join(words)


def entry_in_every_model(module: str) -> str:
    """Return the entry of `deny` that keeps modules of a name in float32, in every model; or a whole model."""
    return f"{MODULE}{module.rpartition(':')[2] or module}"


@dataclass(frozen=True)
class Experiment:
    """A failing batch, run again with a change.

    Attributes:
        change: In words.
        loss: The loss then.
        error: How far that is from float32's loss, relative to it.
        finite: The loss and all gradients are finite.
        cures: They are, what is computed agrees with float32, and training goes on.
        raised: What was raised then; "" for nothing.
        fails_later: Training does not go on behind this step of a script.
    """

    change: str
    loss: float
    error: float
    finite: bool
    cures: bool
    raised: str = ""
    fails_later: bool = False

    def __str__(self) -> str:
        """Return what came out, in a line."""
        if self.raised:
            return f"{self.change}: {self.raised}"
        off = f", {percent(self.error)} from float32's" if math.isfinite(self.error) else ""
        finite = "finite" if self.finite else "gradients are not finite" if math.isfinite(self.loss) else "not finite"
        later = ", and the next steps fail" if self.finite and self.fails_later else ""
        return f"{self.change}: loss {self.loss:.4g}, {finite}{off}{later}"


@dataclass(frozen=True)
class Alone:
    """A module that cures by itself.

    Attributes:
        module: Its name.
        widens: An operation outside of it, which computed in low precision, computes in float32 with it.
        experiment: What came out.
    """

    module: str
    widens: bool
    experiment: Experiment


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
            scale: The loss scale to try with, at which the gradients fit; None for that of the batch.
        """
        self.experiments: list[Experiment] = []
        self.producer: int | None = None  # the position of what lost what is missed at the place, where that was seen
        self._fault, self._dtype, self._again, self._scale = fault, dtype, again, scale
        self._reference = reference

    def cure(self, settled: Seen | None = None) -> Change | None:
        """Return the change that cures the batch; None where none of those tried does, or nothing is to be cured.

        Args:
            settled: The batch with a loss scale of 1, where that was tried and is finite.
        """
        if self._fault.kind == "loss scale" and settled is not None:
            self.experiments.append(self._judged(Change(scale=self._scale), settled))
        return self._in_float32() if self._fault.kind in PRECISION and not self._fault.by_hand else None

    def smallest_module(self, names: Sequence[str], closest: float) -> Alone | None:
        """Return the smallest module that alone cures a loss; None where none of those tried does.

        Those that are in no other are tried first, a few of them; then those inside of what cures. One of these is
        passed over if it widens something beside it: which of the two cures is not known.

        Args:
            names: Of modules, the likeliest first.
            closest: How far the loss may then be from float32's, relative to it.
        """
        cure: Alone | None = None
        while cure is None or not cure.widens:
            parts = parts_of("" if cure is None else cure.module, names)[:TRIES]
            tried = (self._alone(module) for module in parts)
            part = next((part for part in tried if part is not None and part.experiment.error < closest), None)
            if part is None or (cure is not None and part.widens):
                break
            cure = part
        return cure

    def _alone(self, module: str) -> Alone | None:
        """Keep only a module in float32; None where that does not cure."""
        seen = self._run(Change((module,), scale=self._scale))
        if seen is None or not self.experiments[-1].cures:
            return None
        now = by_key(seen.readings)
        low = (key_of(entry) for entry in _operations_outside([module], self._fault.readings) if _computes_low(entry))
        widens = any(key in now and not is_low(now[key]) for key in low)
        return Alone(module, widens, self.experiments[-1])

    def _in_float32(self) -> Change | None:
        """Keep more and more modules in float32."""
        kept: tuple[str, ...] = ()
        readings, position = self._fault.readings, self._fault.position
        while position is not None and len(self.experiments) < TRIES:
            module = _candidate(readings, position, kept)
            if module is None:
                break
            kept = (*kept, module)
            seen = self._attempt(kept)
            if self.experiments[-1].cures:
                kept, seen = self._needed(kept, seen)
                self.producer = self._producer(kept, seen)
                return Change(kept, scale=self._scale)
            if seen is not None:
                readings, position = seen.readings, self._failing(seen)
        return self._elsewhere()

    def _elsewhere(self) -> Change | None:
        """Keep the operation in float32 that computes in low precision at the place or last before it; then bfloat16.

        What a backend does not take as the name of an operation is not tried.
        """
        at = None if self._fault.position is None else low_operation(self._fault.readings, self._fault.position)
        operations = () if at is None else (self._fault.readings[at].operation,)
        changes = [Change(operations=operations, scale=self._scale)] if operations else []
        if self._dtype == "float16" and self._fault.kind in RANGE:
            changes.append(Change(scale=1.0, dtype="bfloat16"))
        cure = next(
            (change for change in changes if self._run(change) is not None and self.experiments[-1].cures), None
        )
        # With the module of the place in float32 it was not cured: then the operation is at fault elsewhere.
        is_before = at != self._fault.position
        if cure is not None and cure.operations and is_before and self._loses and not self._place.module:
            self.producer = at
        return cure

    @property
    def _place(self) -> Reading:
        assert self._fault.position is not None
        return self._fault.readings[self._fault.position]

    @property
    def _loses(self) -> bool:
        """Whether what is missed at the place may be lost before: no value has lost what flushes on the way back."""
        flushes = self._fault.kind == "flush" and self._place.direction == "forward"
        return self._fault.cancels or self._fault.kind == "digits" or flushes

    def _needed(self, kept: tuple[str, ...], seen: Seen | None) -> tuple[tuple[str, ...], Seen | None]:
        """Leave out each module without which the batch is cured as well; the last is needed, as was seen.

        Args:
            kept: Modules that cure the batch.
            seen: The batch with these in float32.
        """
        for module in kept[:-1]:
            fewer = tuple(name for name in kept if name != module)
            without = self._attempt(fewer)
            if self.experiments[-1].cures:
                kept, seen = fewer, without
        return kept, seen

    def _producer(self, kept: tuple[str, ...], seen: Seen | None) -> int | None:
        """Return the output of a module that lost what is missed at the place; None where that is lost at the place.

        It is another one if what that returned was wrong already, or if nothing behind it computes in low precision. Or
        if what was wrong at the place is right now, computed in the low precision as before. Or if the batch is wrong
        in float32, too, once only that module rounds to the dtype's digits: no float32 behind it helps.

        Args:
            kept: Modules that cure the batch.
            seen: The batch with these in float32.
        """
        readings = self._fault.readings
        ends = [at for at, entry in enumerate(readings[: self._fault.position]) if is_output(entry, kept)]
        if not self._loses or not ends or _is_part_of_any(self._place.module, kept):
            return None
        last = readings[ends[-1]]
        is_in_it = self._is_wrong(last) or self._is_last_in_low(ends[-1])
        is_to_blame = is_in_it or self._mends_low(kept, seen) or self._fails_rounded(last.module)
        return ends[-1] if is_to_blame else None

    def _is_last_in_low(self, end: int) -> bool:
        """Return whether operations computed in low precision up to a position, and none behind it to the place."""
        assert self._fault.position is not None
        low = [at for at, entry in enumerate(self._fault.readings[: self._fault.position + 1]) if _computes_low(entry)]
        return bool(low) and low[-1] <= end

    @functools.cached_property
    def _exact(self) -> dict[Key, Reading]:
        return by_key(self._reference().readings)

    def _is_wrong(self, entry: Reading) -> bool:
        return error_of(entry, self._exact.get(key_of(entry))) > WRONG

    def _fails_rounded(self, module: str) -> bool:
        """Return whether the batch is wrong in float32, too, where only a module rounds."""
        change = Change(scale=1.0, dtype="float32", rounded=module, bits=FORMATS[self._dtype].bits)
        seen = self._again(change, self._modules())
        return isinstance(seen, Seen) and not self._agrees(seen)

    def _mends_low(self, kept: tuple[str, ...], seen: Seen | None) -> bool:
        """Return whether the first value that was wrong is right now, though it is computed in the low precision.

        What only moves numbers computes none.
        """
        now = by_key(() if seen is None else seen.readings)
        wrong = filter(self._is_wrong, _operations_outside(kept, self._fault.readings[self._fault.position :]))
        again = (now[key_of(entry)] for entry in wrong if key_of(entry) in now)
        computed = (entry for entry in again if is_low(entry) or family(entry.operation) not in ("mask", "move"))
        first = next(computed, None)
        return first is not None and is_low(first) and not self._is_wrong(first)

    def _modules(self) -> list[str]:
        return [entry.module for entry in self._reference().readings]

    def _attempt(self, kept: tuple[str, ...]) -> Seen | None:
        """Run the batch with modules in float32; where the loss is right and gradients overflow, at a scale of 1."""
        seen = self._run(Change(kept, scale=self._scale))
        if seen is None or self._scale in (None, 1.0) or not seen.only_gradients_overflow:
            return seen
        if not loss_is_wrong(seen, self._reference()):
            self._scale = 1.0
            self.experiments.pop()
            seen = self._run(Change(kept, scale=self._scale))
        return seen

    def _run(self, change: Change) -> Seen | None:
        """Run the batch with a change, and note what came out."""
        seen = self._again(change, self._modules())
        if isinstance(seen, Refusal) and change.operations:
            return None
        if isinstance(seen, Refusal):
            self.experiments.append(Experiment(str(change), math.nan, math.nan, False, False, seen.message))
            return None
        self.experiments.append(self._judged(change, seen))
        return seen

    def _judged(self, change: Change, seen: Seen) -> Experiment:
        """Return what came out of a change."""
        reference, loss = self._reference(), seen.replayed.loss
        error = relative_error(np.array([loss]), np.array([reference.replayed.loss]))
        flushes = self._of_gradients and lost_gradients(seen, reference)
        cures = self._agrees(seen) and not flushes and not seen.fails_later
        return Experiment(str(change), loss, error, seen.finite, cures, fails_later=seen.fails_later)

    def _agrees(self, seen: Seen) -> bool:
        """Return whether the loss, and where only values were wrong these, agree with float32's."""
        agrees = seen.finite and not loss_is_wrong(seen, self._reference())
        return agrees and (not self._fault.stays_finite or self._failing(seen) is None)

    @property
    def _of_gradients(self) -> bool:
        """Whether the fault is that gradients flush to zero."""
        return self._fault.kind == "flush" and not self._fault.stays_finite

    def _failing(self, seen: Seen) -> int | None:
        """Return where a run fails, or where it is wrong though all is finite."""
        if not seen.finite:
            return first_failing(seen.readings, self._exact)
        wrong = first_wrong(seen.readings, self._exact, self._dtype, loss_is_wrong(seen, self._reference()))
        return first_flushed(seen, self._exact) if wrong is None and self._of_gradients else wrong


def _candidate(readings: Sequence[Reading], position: int, kept: Sequence[str]) -> str | None:
    """Return the module to keep in float32 beside others: that of the place.

    Where that is in float32 already, what it receives is wrong: then the module that ran before it, or else the one
    around it. None for none.
    """
    module = readings[position].module
    if module and not _is_part_of_any(module, kept):
        return module
    before = (name for name in reversed(_computing(readings[:position])) if not _is_part_of_any(name, (*kept, module)))
    around = outer_name(module) if module else None
    return next(before, around if around not in kept else None) or None


def parts_of(outer: str, names: Sequence[str]) -> list[str]:
    """Return the modules that are directly inside of another; of `""` those that are directly inside of a model."""
    within = [name for name in names if name.rpartition(":")[2] and (not outer or inside(name, outer))]
    return [name for name in within if not any(inside(name, other) for other in within)]


def low_operation(readings: Sequence[Reading], position: int) -> int | None:
    """Return the position of the operation at a place, or else before it in the same module, in low precision."""
    module = readings[position].module
    own = (at for at in range(position, -1, -1) if readings[at].module == module)
    return next((at for at in own if _computes_low(readings[at])), None)


def ran_before(readings: Sequence[Reading], position: int) -> bool:
    """Return whether an operation ran in low precision before, at another line or in another module."""
    entry = readings[position]
    same = (other for other in readings[:position] if other.operation == entry.operation and _computes_low(other))
    return any((other.module, other.place) != (entry.module, entry.place) for other in same)


def _computes_low(entry: Reading) -> bool:
    return _computes(entry) and entry.direction == "forward" and is_low(entry)


def _computing(readings: Sequence[Reading]) -> list[str]:
    """Return the names of modules that have computed something themselves, in order of execution.

    Where no operations are seen, those compute that have no modules inside.
    """
    forward = [entry for entry in readings if entry.direction == "forward" and entry.module]
    names = [entry.module for entry in forward]
    computing = [entry.module for entry in forward if _computes(entry)]
    return computing or [name for name in names if not any(inside(other, name) for other in names)]


def _computes(entry: Reading) -> bool:
    """Return whether a value is of an operation that makes numbers, and neither casts nor moves them."""
    return bool(entry.operation) and family(entry.operation) not in ("cast", "move")


def _operations_outside(modules: Sequence[str], readings: Sequence[Reading]) -> list[Reading]:
    forward = (entry for entry in readings if entry.direction == "forward" and entry.operation)
    return [entry for entry in forward if not _is_part_of_any(entry.module, modules)]


def is_output(entry: Reading, modules: Sequence[str]) -> bool:
    """Return whether a value is what one of some modules returns."""
    return entry.direction == "forward" and not entry.operation and entry.module in modules


def _is_part_of_any(name: str, modules: Sequence[str]) -> bool:
    return any(module and is_part(name, module) for module in modules)
