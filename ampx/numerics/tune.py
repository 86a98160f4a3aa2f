"""Find which modules must stay in float32, for safety and for speed, by measuring."""

from __future__ import annotations

import abc
import functools
import glob
import math
import os
import statistics
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar, get_args

import numpy as np

from ampx import callers
from ampx.backend import MODULE, Array, CastPlan
from ampx.errors import InvalidOptionError, PrecisionWarning, UnsupportedDtypeError, UnsupportedOpError, shown
from ampx.formats import FORMATS, digits_of
from ampx.policy import Dtype, OptLevel, PolicyFile
from ampx.session import listed

from .batch import FLOAT32, SAMPLES, Batch, Casting, Seen, fitting_scale, in_one_line, plain, scaled
from .causes import Fault, find_fault
from .compare import Comparison, ModuleError, bound, check_tolerance, compared, module_errors, unscaled, worst_errors
from .operations import failing, family
from .places import Place, error_of, is_low, key_of
from .probe import Reading, Replayed, Step, Watching
from .timing import speed_in_words
from .tolerance import RESOLUTION, Distance, Tolerance, by_count, by_rounding, percent, rounding, with_joined_gradients

# Beginnings of the order are tried that are so many times as long as the last.
GROWTH: Final = 4
# Below this a ratio of times is no difference.
ALIKE: Final = 0.02
DISABLED: Final = "nothing is left but to check gradients; true does so, at the cost of a small step's time"


@dataclass(frozen=True)
class Choice:
    """An entry of `allow` or `deny`, and the measurement behind it.

    Attributes:
        entry: As `init` takes it: `"module:name"`, or the name of an operation.
        reason: One sentence with the numbers.
    """

    entry: str
    reason: str


@dataclass(frozen=True)
class TunedPolicy:
    """What to compute in which dtype, measured.

    Attributes:
        framework: Name of the framework.
        device: Name of the device that it was measured on.
        dtype: The compute dtype; `"float32"` where low precision does not pay.
        level: The opt level.
        loss_scale: As `init` takes it: `"dynamic"`, or a number.
        deny: What stays in float32.
        allow: What computes in the dtype beyond the framework's own list.
        reasons: Why, by `"dtype"`, `"level"`, `"loss_scale"` and `"enabled"`: one sentence each.
        modules: Names of all modules of the model, by which a file that is stale is known.
        agrees: Whether loss and gradients agree with float32's within the tolerance.
        tolerance: Relative tolerance of loss and gradients, the larger one.
        speed: Steps per second over those of float32 on this device; None where that was not measured.
        replays: How often the batch was computed.
        operations: Operations that could stay in float32 instead of the modules, wherever they are; () where that is
            not enough, or where it was not asked.
        enabled: As `init` takes it. False where float32 is the fastest: calls of ampx cast and scale nothing there,
            and would add their check of gradients to each step.
    """

    framework: str
    device: str
    dtype: str
    level: OptLevel
    loss_scale: str | float
    deny: tuple[Choice, ...] = ()
    allow: tuple[Choice, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    agrees: bool = True
    tolerance: float = 0.0
    speed: float | None = None
    replays: int = 0
    operations: tuple[str, ...] = ()
    enabled: bool = True

    @property
    def file(self) -> PolicyFile:
        """What `init(policy=…)` reads, with the reasons as comments."""
        reasons = {choice.entry: choice.reason for choice in (*self.deny, *self.allow)}
        return PolicyFile(
            self.framework,
            self.dtype,
            self.level,
            self.loss_scale if self.loss_scale == "dynamic" else "auto",
            tuple(choice.entry for choice in self.allow),
            tuple(choice.entry for choice in self.deny),
            {**self.reasons, **reasons},
            enabled=self.enabled,
        )

    def write(self, path: str | os.PathLike[str] = "ampx.toml") -> None:
        """Write the policy file, for `init(policy=…)` and `ampx run --policy`.

        Where there is one already, the comments and entries that a person added to it stay.

        Raises:
            PolicyFileError: The file that is there is no TOML.
            UnsupportedDtypeError: The dtype was simulated, and no framework trains in it.
        """
        accepted = get_args(Dtype)
        if self.dtype not in accepted:
            raise UnsupportedDtypeError(
                f"a policy in {self.dtype} cannot be used; accepted: {', '.join(accepted)}. It answers what would be; "
                f"tune without what_if for one that this device computes."
            )
        path = Path(path)
        before = path.read_bytes() if path.is_file() else b""
        path.write_text(self.file.text(before, str(path)), encoding="utf-8")

    def timed(self, ratios: Sequence[float], slow: Mapping[str, tuple[float, float]]) -> TunedPolicy:
        """Return the policy with its speed, and with modules in float32 that lose time in low precision.

        Args:
            ratios: Steps per second over those of float32, by round.
            slow: The modules, with their seconds in low precision and in float32.
        """
        choices = [
            Choice(entry_of(name), f"{1e3 * low:.3g} ms in {self.dtype}, {1e3 * wide:.3g} ms in float32")
            for name, (low, wide) in slow.items()
        ]
        reason = f"{self.reasons['dtype']}; {speed_in_words(ratios)}"
        speed = statistics.median(ratios)
        return replace(self, deny=(*self.deny, *choices), speed=speed, reasons={**self.reasons, "dtype": reason})

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        result: dict[str, Any] = plain(self)
        return result


def in_float32(reason: str, agrees: bool = True, speed: float | None = None) -> dict[str, Any]:
    """Return the fields of the policy that casts nothing; one that was chosen for its `speed` switches ampx off."""
    why = {"dtype": reason, "level": "nothing is cast", "loss_scale": "float32 needs none", "enabled": DISABLED}
    return {
        "dtype": "float32",
        "level": "O0",
        "loss_scale": 1.0,
        "reasons": why,
        "agrees": agrees,
        "speed": speed,
        "enabled": speed is None,
    }


def minimal(
    names: Sequence[str], passes: Callable[[frozenset[str]], bool], most: int | None = None
) -> frozenset[str] | None:
    """Return a smallest set of names that passes, with few calls of `passes`.

    It is exact where every superset of a set that passes does so, too. Elsewhere it is a set that passes. Of `n` names
    of which `k` are returned it calls `passes` at most `2 k log2(n) + 2` times.

    Names that are needed are found one by one: that which completes the shortest beginning of `names` that passes is
    one. The length is searched in steps that grow, so that names in front, the likely ones, are found in few calls.

    Args:
        names: All names, the likeliest first.
        passes: Returns whether a set is enough.
        most: How many names are of use; None for any number.

    Returns:
        The names; None where not even all together pass, or only more than are of use.
    """
    needed: frozenset[str] = frozenset()
    if passes(needed):
        return needed
    candidates = list(dict.fromkeys(names))
    if not candidates or not passes(frozenset(candidates)):
        return None
    while True:
        failing, passing = 0, len(candidates)  # lengths of beginnings
        length = 1
        while length < passing and not passes(needed | frozenset(candidates[:length])):
            failing, length = length, GROWTH * length
        passing = min(passing, length)
        while passing - failing > 1:
            middle = (failing + passing) // 2
            if passes(needed | frozenset(candidates[:middle])):
                passing = middle
            else:
                failing = middle
        needed |= {candidates[passing - 1]}
        candidates = candidates[: passing - 1]
        if not candidates or passes(needed):
            return needed
        if len(needed) == most:
            return None


def by_error(
    modules: Sequence[str], errors: Sequence[ModuleError], effects: Mapping[str, float] | None = None
) -> list[str]:
    """Return modules in the order in which they are likely to be needed in float32.

    In front are modules that are not finite though all that they hold is: they break by themselves. Then come those
    without others inside, that which adds most to the error of values or of the loss in front, of equals the last; then
    those that hold others, the innermost first, for what they compute themselves.

    Args:
        modules: Names of all modules.
        errors: Of the values of modules, in order of execution.
        effects: By module, how far the loss is off by what its outputs are off by, in first order, relative to it.
    """
    holds = {name for name in modules if any(inside(other, name) for other in modules)}
    added = _added(errors, holds)
    for name, effect in _growing(effects or {}, holds):
        added[name] = max(effect, added.get(name, 0.0))
    alone = _broken_alone(holds, errors)
    leaves = sorted((name for name in reversed(modules) if name not in holds), key=lambda name: -added.get(name, 0.0))
    inner = sorted(holds.difference(alone), key=lambda name: -name.count(".") if name else 1)
    return alone + leaves + inner


def _broken_alone(holds: Collection[str], errors: Iterable[ModuleError]) -> list[str]:
    """Return the modules with others inside that are not finite where all inside is."""
    broken = dict.fromkeys(entry.module for entry in errors if entry.direction == "forward" and math.isinf(entry.error))
    return [name for name in broken if name in holds and not any(inside(other, name) for other in broken)]


def _growing(effects: Mapping[str, float], holds: Container[str]) -> Iterator[tuple[str, float]]:
    """Yield by how much each module that holds no other moves the loss more than the module before."""
    before = 0.0
    for name, effect in effects.items():
        if name not in holds:
            yield name, effect - before
            before = effect


def _added(errors: Iterable[ModuleError], holds: Container[str]) -> dict[str, float]:
    """Return by how much the error at a module is larger than that at the module before, at most."""
    added: dict[str, float] = {}
    before: dict[str, ModuleError] = {}
    for entry in errors:
        if entry.module in holds:
            continue
        last = before.get(entry.direction)
        error = 0.0 if last is None else last.error
        step = 0.0 if math.isinf(error) else entry.error - error
        # A gradient goes wrong in the backward of the module that it came through, or by what the module returned.
        through = [last] if entry.direction == "backward" and last is not None else []
        for module in {other.module for other in (*through, entry)}:
            added[module] = max(step, added.get(module, 0.0))
        before[entry.direction] = entry
    return added


def first_order(reference: Sequence[Reading], low: Sequence[Reading], loss: float) -> dict[str, float]:
    """Return how far a loss is off by what outputs of modules are off by, in first order, relative to the loss.

    That is the gradient of the output, of the one backward in float32, times the difference of the outputs.

    Args:
        reference: Readings in float32, with samples.
        low: Readings of the same batch in low precision, with samples.
        loss: In float32.
    """
    outputs, gradients = (_sampled(reference, direction) for direction in ("forward", "backward"))
    values = _sampled(low, "forward")
    sizes = {(entry.module, entry.call): entry.value.elements for entry in reference if entry.direction == "forward"}
    effects: dict[str, float] = {}
    for key in [key for key in outputs if key in gradients and key in values]:
        if outputs[key].shape == gradients[key].shape == values[key].shape:
            with np.errstate(invalid="ignore", over="ignore"):  # of what is not finite nothing is known in first order
                product = float(np.dot(gradients[key], values[key] - outputs[key]))
            moved = product * sizes[key] / max(1, outputs[key].size)
            effect = abs(moved) / (abs(loss) or 1.0)
            effects[key[0]] = max(effect if math.isfinite(effect) else 0.0, effects.get(key[0], 0.0))
    return effects


def _sampled(readings: Iterable[Reading], direction: str) -> dict[tuple[str, int], Array]:
    """Return the samples of modules' values by module and call."""
    return {
        (entry.module, entry.call): np.asarray(entry.sample, np.float64)
        for entry in readings
        if entry.direction == direction and not entry.operation and entry.sample is not None
    }


def inside(name: str, outer: str) -> bool:
    """Return whether a module stands in another."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def kept_in_float32(names: Iterable[str], modules: Sequence[str]) -> dict[str, str]:
    """Return what `Probe.force` takes to compute modules, and all inside them, in float32."""
    forced: dict[str, str] = {}
    for name in sorted(names):
        forced[glob.escape(name)] = "float32"
        if any(inside(other, name) for other in modules):
            forced[f"{glob.escape(name)}.*" if name else "*"] = "float32"
    return forced


def rounded_alone(name: str, modules: Sequence[str], bits: int) -> dict[str, str]:
    """Return what `Probe.force` takes to round what a module, and all inside it, take and return to so many bits."""
    return dict.fromkeys(kept_in_float32([name], modules), digits_of(bits))


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
    return fastest(times) == "float32" and _best(times)[0] > 1 + ALIKE


def _best(times: Mapping[str, Sequence[float]]) -> tuple[float, list[float]]:
    """Return the best speed of what is not float32, relative to it: the median of the rounds, and all."""
    others = [seconds for name, seconds in times.items() if name != "float32"]
    ratios = [[mine / other for mine, other in zip(times["float32"], seconds, strict=True)] for seconds in others]
    best = max(ratios, key=statistics.median)
    return statistics.median(best), best


def not_faster(policy: TunedPolicy, times: Mapping[str, Sequence[float]]) -> str:
    """Return why float32 is preferred to a policy in low precision that agrees with it.

    Args:
        policy: The policy.
        times: As for `fastest`, of `"float32"` and of choices in low precision.
    """
    speed, best = _best(times)
    names = [choice.entry for choice in policy.deny]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    kept = f" with {', '.join(names[:3])}{more} in float32" if names else ""
    reason = f"{policy.dtype}{kept} agrees, and runs at {speed_in_words(best)} here"
    return reason if speed <= 1 + ALIKE else f"{reason}, which is within the spread; more repeats may decide"


# -- the search ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """What a run keeps in float32: modules with all inside them, and operations wherever they are."""

    modules: frozenset[str] = frozenset()
    operations: frozenset[str] = frozenset()

    @property
    def entries(self) -> frozenset[str]:
        """Names of all."""
        return self.modules | self.operations

    def without(self, name: str) -> Kept:
        """Return all of this but one entry."""
        return Kept(self.modules - {name}, self.operations - {name})


NOTHING: Final = Kept()
# A run without a module, one in float32 and one with the module, whose operations are read, and one that tries another.
_LOOKS: Final = 4


def most_runs(entries: int, modules: int) -> int:
    """Return how many runs a search makes at most that keeps so many entries in float32, of so many modules.

    That is all of them but those that are timed. Where nothing is kept it is that of one entry, which was looked for.
    """
    entries = max(1, entries)
    return math.ceil(2 * entries * math.log2(max(2, modules)) + 10 + entries)


Run = TypeVar("Run")


class Search(abc.ABC, Generic[Run]):
    """The measurements of `searched`, of a batch or of a script.

    Attributes:
        framework: Name of the framework.
        device: Name of the device.
        dtype: The low precision.
        tolerance: How far a run may be from float32's.
        asked: That, as the user passed it; None where it is what rounding explains.
        measures: What is run.
        scale: The loss scale of runs in the dtype; it falls where gradients overflow.
        smallest_scale: What it falls to: with less, gradients would flush, which is tried once.
        runs: How many runs were made.
        ended: The search has used up its runs; smaller sets were left untried.
        simulated: Values are rounded where modules take and return them, and operations compute in float32.
        for_inference: The output counts, and gradients do not.
        modules: Names of all modules, in order of execution.
        order: The same, the likeliest to be needed in float32 first.
        output: The module whose output is the model's; None where none has a name.
        failures: By what was kept in float32, by what that run is too far off; empty where it agrees.
        without: By module or operation that is kept, by what a run is too far off that lacks only this.
        hands_on: By module that is kept for what fails behind it, in words where that is.
        module_of: By operation that is kept, in which module it fails, where that is known.
    """

    framework: str
    device: str
    dtype: str
    tolerance: Tolerance
    asked: float | None = None
    measures: ClassVar[str] = "script"
    scale: float = 1.0
    smallest_scale: float = 1.0
    runs: int = 0
    ended: bool = False
    simulated: bool = False
    modules: tuple[str, ...] = ()
    order: Sequence[str] = ()

    def __init__(self, for_inference: bool, readings: Iterable[Reading]) -> None:
        """Take the names of modules from the first run in float32."""
        outputs = [entry.module for entry in readings if not entry.operation and entry.direction == "forward"]
        self.for_inference = for_inference
        self.modules = tuple(dict.fromkeys(outputs))
        self.output = outputs[-1] if outputs else None
        self.failures: dict[Kept, str] = {}
        self.without: dict[str, str] = {}
        self.hands_on: dict[str, str] = {}
        self.module_of: dict[str, str] = {}
        self._flushes = False  # a scale below the smallest was tried, and did not help
        self._looks: dict[tuple[Kept | None, int], Seen] = {}
        self.step_of: dict[Kept, int] = {}  # in which runs fail, where it is not the first

    @abc.abstractmethod
    def compute(self, kept: Kept) -> Run:
        """Run in the dtype, with this in float32.

        Raises:
            UnsupportedOpError: No run can keep an operation.
        """

    @abc.abstractmethod
    def overflows(self, run: Run) -> bool:
        """Return whether gradients of a step are not finite, though all that was computed forward is."""

    @abc.abstractmethod
    def failure(self, run: Run) -> str:
        """Return in words by what a run is too far from float32's; empty where it agrees."""

    @abc.abstractmethod
    def look(self, kept: Kept | None, step: int) -> Seen:
        """Compute a step with this in float32, all of it for None, and read every operation in it."""

    @abc.abstractmethod
    def fails_rounded(self, module: str) -> bool:
        """Return whether float32 is too far from itself where only a module rounds to the digits of the dtype."""

    @abc.abstractmethod
    def smallest_operations(self) -> frozenset[str] | None:
        """Return a smallest set of operations that cures what no module does; None where there is none."""

    @abc.abstractmethod
    def failing_operations(self, modules: frozenset[str]) -> tuple[str, ...]:
        """Return the operations that make what is not finite of what is finite, which may do instead of modules."""

    @abc.abstractmethod
    def policy_fields(self, kept: Kept) -> dict[str, Any]:
        """Return `deny`, `allow` and `reasons` of the policy, with what was measured."""

    @property
    @abc.abstractmethod
    def beginning(self) -> Distance | None:
        """How far the first run in the dtype is from float32's; None where what raised or failed was not compared."""

    @abc.abstractmethod
    def hopeless(self, whole: bool) -> dict[str, Any]:
        """Return the fields of the policy where nothing helps, or nothing less than the `whole` model in float32."""

    @abc.abstractmethod
    def slow(self, kept: Kept, repeats: int) -> dict[str, tuple[float, float]]:
        """Return the modules that lose time in low precision: see `slow_modules`."""

    @abc.abstractmethod
    def times(self, choices: Mapping[str, Kept | None], repeats: int) -> dict[str, list[float]]:
        """Return the times of each choice in rounds, for `fastest`; None keeps all in float32."""

    def affords(self, entries: int, runs: int = 1) -> bool:
        """Return whether so many more runs may be made for a result of so many entries: see `most_runs`."""
        return self.runs + runs <= most_runs(entries, len(self.modules))

    def settled(self, kept: Kept) -> Run:
        """Run in the dtype with a loss scale that fits: before a module is blamed for skipped steps, the scale is.

        The scale stays as small as one run needed it. If it rose again, other runs would be skipped for its sake.
        """
        run = self.compute(kept)
        if self.overflows(run) and self.scale > self.smallest_scale:
            self.scale = self.smallest_scale
            run = self.compute(kept)
        if self._flushes or not self.overflows(run) or self.scale == 1:
            return run
        # With less some gradients flush. That may do no harm: once it is tried.
        scale, self.scale = self.scale, 1.0
        unscaled = self.compute(kept)
        self._flushes = bool(self.failure(unscaled))
        if self._flushes:
            self.scale = scale
        return run if self._flushes else unscaled

    def judged(self, kept: Kept) -> str:
        """Return the failure of a run with this in float32, which is made once; empty where it agrees."""
        if kept not in self.failures:
            try:
                self.failures[kept] = self.failure(self.settled(kept))
            except UnsupportedOpError as error:
                self.failures[kept] = str(error)
            self.note(kept)
        return self.failures[kept]

    def note(self, kept: Kept) -> None:
        """Keep a verdict for a search that goes on after an interruption; the default keeps none."""

    def passes(self, kept: Kept, entries: int | None = None, reserve: int = 0) -> bool:
        """Return whether a run with this in float32 agrees with float32; False for what no run can keep.

        Args:
            kept: What to keep.
            entries: False, too, where a result of so many entries may take no more runs; None for any number.
            reserve: How many runs are to be left then.
        """
        if entries is not None and kept not in self.failures and not self.affords(entries, 1 + reserve):
            self.ended = True
            return False
        return not self.judged(kept)

    def does_without(self, fewer: Kept) -> bool:
        """Return whether a set with an entry less than the result passes, within the runs that so few entries may take.

        Where the result is a smallest set, it does so only by chance. Where it fails, the entry is shown to be needed.
        """
        passes = self.passes(fewer, len(fewer.entries) + 1)
        in_time = self.affords(len(fewer.entries), 0)
        self.ended |= passes and not in_time
        return passes and in_time

    def seen(self, kept: Kept | None, step: int = 1) -> Seen:
        """Return a step with this in float32, all of it for None; it is computed once."""
        if (kept, step) not in self._looks:
            self._looks[kept, step] = self.look(kept, step)
        return self._looks[kept, step]

    def failing(self, kept: Kept) -> Seen:
        """Return the step in which a run with this in float32 fails."""
        return self.seen(kept, self.step_of.get(kept, 1))

    def fault(self, kept: Kept) -> Fault | None:
        """Return what fails with this in float32, as `diagnose` finds it in the step that fails; None for nothing."""
        wide = replace(self.seen(None, self.step_of.get(kept, 1)), tolerance=self.tolerance.loss)
        return find_fault(self.failing(kept), wide, self.dtype, self.scale)

    def reason(self, name: str, measured: str) -> str:
        """Return why something is kept: what was measured of it, what happens without it, and what it is for."""
        without, hands_on = self.without.get(name), self.hands_on.get(name)
        parts = [measured, without and f"without this entry {without}", hands_on and f"it is kept for {hands_on}"]
        return "; ".join(filter(None, parts))

    def reason_of_operation(self, operation: str) -> str:
        """Return why an operation is kept: where it fails, and what happens without it."""
        module = self.module_of.get(operation, "")
        where = f"in module {module!r}" if module.rpartition(":")[2] else "outside of modules"
        return self.reason(operation, f"fails in {self.dtype}, {where}")

    def limit(self, numbers: str) -> str:
        """Return in words how far a run may be from float32's: by these numbers."""
        limit = f"the rounding noise of this {self.measures}" if self.asked is None else "the tolerance"
        return f"{limit} ({numbers})"

    def policy(self, **fields: Any) -> TunedPolicy:
        """Return a policy with these fields, and those of the search."""
        return TunedPolicy(
            self.framework,
            self.device,
            modules=self.modules,
            tolerance=max(self.tolerance.loss, self.tolerance.gradients),
            replays=self.runs,
            **fields,
        )


def fails_outside(tolerance: Tolerance, run: Distance | None) -> bool:
    """Return whether all that modules return agrees, and the loss or the first gradient of an output is not finite."""
    if run is None:
        return False
    gradient = next((entry.error for entry in run.values if entry.direction == "backward"), 0.0)
    agrees = all(entry.error <= tolerance.of(entry) for entry in run.values if entry.direction == "forward")
    return agrees and (math.isinf(run.loss) or math.isinf(gradient))


def needed(search: Search[Any], candidates: Sequence[str]) -> Kept | None:
    """Return a smallest set of modules whose run agrees with float32's; None where there is none.

    Args:
        search: The measurements.
        candidates: Names of modules, the likeliest first.
    """
    modules = minimal(candidates, lambda names: search.passes(Kept(names)))
    return None if modules is None else _narrowed(search, modules, filter(None, search.order))


def _narrowed(search: Search[Any], modules: frozenset[str], names: Iterable[str]) -> Kept:
    """Leave out each of the modules that have these names once, or keep less of it.

    A module that holds others is kept with all inside. Where one of these does without it, that takes its place; else
    it stays, for what it computes itself: several that only hand float32 on to it are more, and are no cause.
    """
    untried = [name for name in names if name in modules]
    while untried:
        name = untried.pop()
        rest = modules - {name}
        parts = [other for other in search.order if inside(other, name)]
        smaller = minimal(parts, functools.partial(_passes_with, search, rest, len(untried)), most=1)
        if smaller is None:
            search.without[name] = search.failures.get(Kept(rest), "")
        else:
            modules = rest | smaller
            untried += [part for part in parts if part in smaller]
    return Kept(modules)


def _passes_with(search: Search[Any], rest: frozenset[str], untried: int, names: frozenset[str]) -> bool:
    """Return whether names do with the rest, or the rest alone; what is untried is to be left out once, too."""
    kept = Kept(rest | names)
    return search.passes(kept, len(rest) + 1, untried) if names else search.does_without(kept)


def each_needed(search: Search[Any], kept: Kept) -> Kept:
    """Leave out each entry once, and for good where the others do without it."""
    for name in sorted(kept.entries):
        fewer = kept.without(name)
        if search.does_without(fewer):
            kept = fewer
        else:
            search.without[name] = search.failures.get(fewer, "")
    return kept


def at_fault(search: Search[Any], kept: Kept) -> Kept:
    """Put what fails in the place of modules that only hand float32 on to it.

    Without such a module a value behind it fails in low precision, and with it float32 computes that value. Then the
    module that computes the value is tried instead: a user looks there, and a part of it may be replaced or retrained.
    Where that has no name, holds all others or does not do, the operation is tried, which is kept wherever it is.
    Where that does not do, either, the module stays, and its reason says what it is for.
    """
    for name in [] if search.simulated else sorted(kept.modules):
        if name not in kept.modules:
            continue
        if not search.affords(len(kept.entries), _LOOKS):
            search.ended = True
            break
        fault = _behind(search, kept, name)
        if fault is not None and fault.place is not None:
            kept = _replaced(search, kept, name, fault, fault.place)
    return kept


def _behind(search: Search[Any], kept: Kept, name: str) -> Fault | None:
    """Return what fails without a module, outside of it, and is computed in float32 with it; None for nothing.

    Or what is a cast, which is not made with it.
    None, too, if something that the module has returned before is wrong already.
    """
    fault = search.fault(kept.without(name))
    place = None if fault is None else fault.place
    if fault is None or place is None or not is_low(place) or name == place.module or inside(place.module, name):
        return None
    step = search.step_of.get(kept.without(name), 1)
    if _is_wrong_before(search, fault, name, step):
        return None
    with_it = search.seen(kept, step).readings
    now = next((entry for entry in with_it if key_of(entry) == key_of(place)), None)
    is_wide = family(place.operation) == "cast" if now is None else not is_low(now)
    return fault if is_wide else None


def _is_wrong_before(search: Search[Any], fault: Fault, name: str, step: int) -> bool:
    """Return whether a module has returned something wrong before the place of a fault in a step."""
    exact = {key_of(entry): entry for entry in search.seen(None, step).readings}
    before = enumerate(fault.readings[: fault.position])
    own = ((at, entry) for at, entry in before if entry.module == name and not entry.operation)
    return any(error_of(entry, exact.get(key_of(entry))) > bound(search.dtype, at) for at, entry in own)


def _replaced(search: Search[Any], kept: Kept, name: str, fault: Fault, place: Reading) -> Kept:
    """Return what is kept with the place of a fault instead of a module, where that agrees; else the same."""
    for instead in _with_place(search, kept.without(name), place):
        if search.passes(instead, len(kept.entries)):
            search.module_of[place.operation] = place.module
            return each_needed(search, instead)
    loses = fault.cancels or fault.kind in ("flush", "digits")  # which the module may have rounded away
    if not loses or (search.affords(len(kept.entries)) and not search.fails_rounded(name)):
        search.hands_on[name] = f"{Place.of(place)}, which fails after it"
    return kept


def _with_place(search: Search[Any], rest: Kept, place: Reading) -> Iterator[Kept]:
    """Yield what keeps a place in float32, beside the rest: its module, then its operation."""
    module = place.module
    if module in search.modules and any(other != module and not inside(other, module) for other in search.modules):
        others = {other for other in rest.modules if not inside(other, module)}
        yield replace(rest, modules=frozenset({*others, module}))
    if place.operation and place.direction == "forward":
        yield replace(rest, operations=rest.operations | {place.operation})


def searched(search: Search[Any], repeats: int) -> TunedPolicy:
    """Find the smallest set that must stay in float32, and what gains nothing from low precision.

    Args:
        search: The measurements.
        repeats: Rounds in which speed is measured; 0 measures none.
    """
    kept, whole = _smallest(search)
    if kept is None:
        return _as_far(search, NOTHING, search.policy(**search.hopeless(whole)))
    kept = at_fault(search, kept)
    policy = search.policy(
        dtype=search.dtype,
        level="O1",
        loss_scale="dynamic" if scaled(search.dtype) and not search.for_inference else 1.0,
        **search.policy_fields(kept),
        operations=_instead(search, kept),
    )
    policy = _as_far(search, kept, policy)
    if repeats:
        policy = _for_speed(search, policy, kept, repeats)
    return replace(policy, replays=search.runs)


def _as_far(search: Search[Any], kept: Kept, policy: TunedPolicy) -> TunedPolicy:
    """Return the policy, with a word about a search that has used up its runs."""
    if not search.ended:
        return policy
    untried = "a set that was not tried may do" if kept == NOTHING else "less in float32, or only what fails, may do"
    ended = f"{policy.reasons['dtype']}; the search ended after {search.runs} runs, the most that it takes: {untried}"
    return replace(policy, reasons={**policy.reasons, "dtype": ended})


def _smallest(search: Search[Any]) -> tuple[Kept | None, bool]:
    """Return a smallest set whose run agrees with float32's, None for none; and whether the model as a whole does."""
    outside = not search.passes(NOTHING) and fails_outside(search.tolerance, search.beginning)
    kept = None if outside else needed(search, search.order)
    whole = kept is not None and "" in kept.modules  # which is float32, but for what stands outside of the model
    if kept is not None and not whole:
        return kept, False
    operations = search.smallest_operations()
    if operations is not None:
        return each_needed(search, Kept(operations=operations)), whole
    if kept is not None:
        kept = _narrowed(search, kept.modules, [""])
        return (None, True) if "" in kept.modules else (kept, False)
    # With the last module in float32 its output is, too. With another one in float32, what fails would be hidden.
    return needed(search, search.order[:1]) if outside else None, whole


def _instead(search: Search[Any], kept: Kept) -> tuple[str, ...]:
    """Return operations that do instead of modules, wherever they are; none where that takes too many runs."""
    if not search.affords(len(kept.entries), 2):
        return ()
    names = search.failing_operations(kept.modules)
    return names if names and search.passes(Kept(operations=frozenset(names)), len(kept.entries)) else ()


def _for_speed(search: Search[Any], policy: TunedPolicy, kept: Kept, repeats: int) -> TunedPolicy:
    """Return a policy that is not slower than float32: without the modules that lose time, or without any casting."""
    denied = {choice.entry for choice in policy.deny}
    slow = {name: times for name, times in search.slow(kept, repeats).items() if entry_of(name) not in denied}
    # The simplest in front: where nothing pays, nothing is cast.
    choices: dict[str, Kept | None] = {FLOAT32.dtype: None, "safe": kept}
    lean = Kept(kept.modules.union(slow), kept.operations)
    if slow and _leaves_some(search.modules, denied | set(map(entry_of, slow))) and search.passes(lean):
        choices["tuned"] = lean
    times = search.times(choices, repeats)
    choice = fastest(times)
    if choice == FLOAT32.dtype:
        return search.policy(**in_float32(not_faster(policy, times), speed=1.0))
    ratios = [mine / other for mine, other in zip(times[FLOAT32.dtype], times[choice], strict=True)]
    return policy.timed(ratios, slow if choice == "tuned" else {})


def _leaves_some(modules: Sequence[str], denied: Container[str]) -> bool:
    """Return whether a module that holds no other is cast still: else nothing is."""
    leaves = [name for name in modules if not any(inside(other, name) for other in modules)]
    return any(entry_of(name) not in denied for name in leaves)


def entry_of(name: str) -> str:
    """Return the entry of `deny` for a module."""
    return MODULE + glob.escape(name)


# -- a batch in code -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Replay:
    """A run of a batch, and what it raised; empty for nothing."""

    seen: Seen
    raised: str = ""


class _BatchSearch(Search[_Replay]):
    """One batch, computed again and again."""

    measures = "batch"

    def __init__(
        self,
        batch: Batch,
        casting: Casting,
        tolerance: float | None,
        for_inference: bool,
        is_what_if: bool,
        deny: Iterable[Any],
        allow: Iterable[Any],
    ) -> None:
        self.batch, self.casting, self.is_what_if, self.lists = batch, casting, is_what_if, (deny, allow)
        self.simulated = casting.simulated
        self.framework, self.device, self.dtype = batch.backend.name, batch.device.name, casting.dtype
        self.watching = Watching(dtype=casting.dtype, samples=SAMPLES)
        self.reference = self.run(FLOAT32, self.watching)
        super().__init__(for_inference, self.reference.readings)
        self.scale = 1.0 if for_inference else fitting_scale(casting.dtype, self.reference)
        self.asked, self.tolerance = tolerance, self._explained().at(tolerance)
        self.smallest_scale = min(self.scale, self.tolerance.smallest_scale(casting.dtype, self.reference.readings))
        self.lowers = True  # something besides what fails is computed in the dtype

    def _explained(self) -> Tolerance:
        """Return what rounding explains, measured where modules have names."""
        if self.casting is FLOAT32 or not self.reference.finite:
            return Tolerance(RESOLUTION, RESOLUTION)
        if self.modules:
            castings = (Casting(FLOAT32.dtype, None, rounding(self.dtype, seed)) for seed in (0, 1))
            first, second = (self.tried(casting, self.watching) for casting in castings)
            if not first.raised and not second.raised:
                return by_rounding(self.dtype, self.distance(second.seen, 1.0, first.seen))
        # Where no module has a name, each parameter stands for one: an output, and the gradient of it.
        count = len(self.reference.readings) or 2 * len(self.reference.replayed.parameters)
        return by_count(self.dtype, count)

    def run(self, casting: Casting, watching: Watching | None = None) -> Seen:
        """Compute the batch, and count that."""
        self.runs += 1
        return self.batch.run(casting, self.scale if casting.dtype == self.dtype else 1.0, watching)

    def casting_of(self, kept: Kept) -> Casting:
        """Return the casting with modules and operations in float32."""
        plan, forced = self.casting.plan, {**self.casting.forced, **kept_in_float32(kept.modules, self.modules)}
        if plan is not None and kept.operations:
            deny = (*plan.deny, *sorted(kept.operations))
            plan = self.batch.backend.check_plan(CastPlan(plan.device, plan.dtype, plan.level, plan.allow, deny))
        return replace(self.casting, forced=forced, plan=plan)

    def compare(self, low: Seen, scale: float, reference: Seen) -> Comparison:
        """Compare a run with another."""
        exact = reference.replayed, reference.readings
        return compared(exact, (low.replayed, low.readings), self.dtype, scale, self.casting.simulated)

    def begin(self) -> None:
        """Compute the batch in the dtype, with nothing more in float32."""
        self.first = self.settled(NOTHING)
        self.failures[NOTHING] = self.failure(self.first)
        self.errors = self.compare(self.first.seen, self.scale, self.reference).modules
        effects = first_order(self.reference.readings, self.first.seen.readings, self.reference.replayed.loss)
        self.order = by_error(self.modules, self.errors, effects)

    @property
    def beginning(self) -> Distance | None:
        return None if self.first.raised else self.distance(self.first.seen, self.scale)

    def compute(self, kept: Kept) -> _Replay:
        only = (glob.escape(self.output),) if self.for_inference and kept != NOTHING and self.output is not None else ()
        return self.tried(self.casting_of(kept), replace(self.watching, modules=only))

    def tried(self, casting: Casting, watching: Watching) -> _Replay:
        """Compute the batch; what the model raises is part of the answer."""
        try:
            return _Replay(self.run(casting, watching))
        except Exception as error:
            return _Replay(Seen(Replayed(math.nan, {}, {}), self.batch.read_before_error), in_one_line(error))

    def overflows(self, run: _Replay) -> bool:
        return math.isfinite(run.seen.replayed.loss) and run.seen.overflows

    def failure(self, run: _Replay) -> str:
        if run.raised:
            return f"the step raises {run.raised}"
        return self.tolerance.exceeded(self.distance(run.seen, self.scale))

    def distance(self, low: Seen, scale: float, reference: Seen | None = None) -> Distance:
        """Return how far a run is from another, by default float32's: loss, gradients and values of modules.

        For inference loss and output.
        """
        reference = reference or self.reference
        comparison = self.compare(low, scale, reference)
        if not self.for_inference:
            exact, other = map(with_joined_gradients, (reference.readings, unscaled(low.readings, scale)))
            errors = module_errors(exact, other, self.dtype)
            return Distance(comparison.loss_error, comparison.gradient_error, errors)
        outputs = [entry for entry in comparison.modules if entry.module == self.output]
        return Distance(comparison.loss_error, values=[entry for entry in outputs if entry.direction == "forward"])

    def fails_rounded(self, module: str) -> bool:
        forced = rounded_alone(module, self.modules, FORMATS[self.dtype].bits)
        return bool(self.failure(self.tried(replace(FLOAT32, forced=forced), self.watching)))

    def look(self, kept: Kept | None, step: int) -> Seen:
        watching = Watching(self.dtype, operations=True, samples=SAMPLES)
        return self.tried(FLOAT32 if kept is None else self.casting_of(kept), watching).seen

    @property
    def takes_operations(self) -> bool:
        """Whether operations can be denied."""
        return self.casting.plan is not None and self.batch.backend.capabilities.op_lists

    def can_deny(self, operation: str) -> bool:
        """Return whether a list may hold an operation."""
        try:
            self.casting_of(Kept(operations=frozenset({operation})))
        except UnsupportedOpError:
            return False
        return True

    def smallest_operations(self) -> frozenset[str] | None:
        if not self.takes_operations:
            return None
        read = sorted(self.failing(NOTHING).readings, key=lambda entry: -entry.value.nonfinite)
        names = filter(self.can_deny, dict.fromkeys(entry.operation for entry in read if entry.operation))
        needed = minimal(list(names), lambda names: bool(names) and self.passes(Kept(operations=names), 1))
        if needed is not None:
            low = (entry for entry in self.seen(Kept(operations=needed)).readings if entry.dtype == self.dtype)
            self.lowers = any(family(entry.operation) != "cast" for entry in low)
        return needed if self.lowers else None

    def failing_operations(self, modules: frozenset[str]) -> tuple[str, ...]:
        return failing(self.failing(NOTHING).readings) if modules and self.takes_operations else ()

    def policy_fields(self, kept: Kept) -> dict[str, Any]:
        errors = (*worst_errors(self.errors, "backward"), *worst_errors(self.errors, "forward"))
        worst = {entry.module: entry for entry in errors}
        kinds = {name: self._reason(worst.get(name)) for name in self.order if name in kept.modules}
        denied = [Choice(entry_of(name), self.reason(name, measured)) for name, measured in kinds.items()]
        denied += [Choice(name, self.reason_of_operation(name)) for name in sorted(kept.operations)]
        reasons = {
            "dtype": f"loss and {self._agree()}{self._simulated()}",
            "level": "casting by the framework's op lists; the parameters stay in float32",
            "loss_scale": f"the largest scale whose gradients fit is at least {self.scale:g} on this batch"
            if scaled(self.dtype)
            else f"{self.dtype} has the exponents of float32",
        }
        asked, allowed = (tuple(Choice(str(entry), "asked for") for entry in entries) for entries in self.lists)
        return {"deny": (*asked, *denied), "allow": allowed, "reasons": reasons}

    def _agree(self) -> str:
        loss, gradients = percent(self.tolerance.loss), percent(self.tolerance.gradients)
        limit = self.limit(loss if self.for_inference else f"{loss} and {gradients}")
        return f"{'output' if self.for_inference else 'gradients'} agree with float32's within {limit}"

    def _simulated(self) -> str:
        device = self.batch.device
        refused = "" if self.dtype in device.native | device.emulated else f", where init refuses {self.dtype}"
        return f", simulated on {device.name}{refused}" if self.casting.simulated else ""

    def _reason(self, error: ModuleError | None) -> str:
        if error is None:
            return f"it shows no error of its own in {self.dtype}"
        if math.isinf(error.error):
            return f"its output is not finite in {self.dtype}"
        return f"its output is off by {percent(error.error)} in {self.dtype}"

    def hopeless(self, whole: bool) -> dict[str, Any]:
        kind = "nothing less than the whole model" if whole or not self.lowers else "nothing that can be kept"
        reason = (
            f"{kind} in float32 makes the result agree with float32's within {self.limit(percent(self.tolerance.loss))}"
        )
        return in_float32(reason, agrees=not self.is_what_if)

    def slow(self, kept: Kept, repeats: int) -> dict[str, tuple[float, float]]:
        rounds = 0 if self.batch.probe.watches_uncompiled else repeats
        castings = [self.casting_of(kept), FLOAT32] * rounds
        readings = [self.run(casting, Watching(times=True)).readings for casting in castings]
        return slow_modules(readings[::2], readings[1::2])

    def times(self, choices: Mapping[str, Kept | None], repeats: int) -> dict[str, list[float]]:
        clocks = {
            name: self.batch.clock(FLOAT32 if kept is None else self.casting_of(kept)) for name, kept in choices.items()
        }
        times = measured(clocks, repeats)
        if is_undecided(times):  # on a busy machine; a step in code is cheap
            more = measured(clocks, 3 * repeats)
            times = {name: [*seconds, *more[name]] for name, seconds in times.items()}
        return times


def tune(
    step: Step,
    model: Any,
    *,
    tolerance: float | None = None,
    dtype: object = None,
    framework: str | None = None,
    device: str | None = None,
    allow: Iterable[Any] = (),
    deny: Iterable[Any] = (),
    for_inference: bool = False,
    what_if: str | None = None,
    repeats: int = 8,
) -> TunedPolicy:
    """Find the smallest set of modules that must stay in float32, and those that gain nothing from low precision.

    One batch is computed again and again, with other modules in float32 each time: first so that loss and gradients
    agree with float32's and all is finite, then so that no time is lost. Nothing is stepped. Of `n` modules of which
    `k` must stay in float32 the search takes at most `2 k log2(n) + 10 + k` replays; in the last `k` each module is
    left out once, and its `reason` says what happens then. Some of them look at operations: what fails behind a module
    that only hands float32 on to it is kept in its place. A replay that raises has failed like any other.

    Args:
        step: A function that takes the model and returns the loss of one batch, without a backward.
        model: The model; its parameters where these are a value (JAX).
        tolerance: How far loss and gradients may be from float32's, relative to their norm; by default eight times as
            far as two runs in float32 are from one another that round, each in its own way, what modules take and
            return. Of the loss that is at least the resolution of bfloat16 (0.4 %), of gradients eight times that, and
            at most a quarter. Outputs of modules and their gradients have to agree alike.
        dtype: The low precision; by default the session's, or what the device prefers. One that the device does not
            compute is simulated, with a warning: `init` refuses such a policy there.
        framework: Name of the framework; by default that of the only session, or the only one imported.
        device: Name of the device; by default the session's, or the best.
        allow: As in `init`; `"module:pattern"` names modules.
        deny: What stays in float32 whatever is measured, as in `init`.
        for_inference: Compare the model's output and the loss, and no gradients.
        what_if: A dtype to simulate, whatever the device computes: would the model survive in it?
        repeats: How often each speed is measured, in turns, and four times as often where that decides nothing; 0
            measures none.

    Returns:
        The policy, every choice with what was measured. Where low precision is not faster on this device by more than
        the spread and 2 %, its dtype is `"float32"`, its level `"O0"`, and its reason has the ratio.

    Raises:
        UnsupportedDtypeError: The device neither computes nor simulates the dtype.
        UnsupportedByBackendError: The backend does not watch, force or replay.
        InvalidOptionError: `tolerance` or `repeats` is out of range.

    Sync: many.

    Example:
        >>> ampx.tune(lambda model: loss_fn(model(x), y), model, repeats=0).write("ampx.toml")
    """
    check_tolerance(tolerance)
    if repeats < 0:
        raise InvalidOptionError(f"repeats={shown(repeats)} is negative; accepted: 0 and more. Pass 5.")
    allow, deny = listed("allow", allow), listed("deny", deny)
    batch = Batch(step, model, framework, device)
    casting = batch.casting(batch.dtype(what_if or dtype), "O1", allow, deny, simulate=what_if is not None)
    computed = sorted(batch.device.native | batch.device.emulated)
    if casting.simulated and what_if is None:
        callers.warn(
            f"tune got dtype={casting.dtype!r}, which {batch.device.name} does not compute: values are rounded to it, "
            f"no speed is measured, and init refuses the policy on this device; computed here: "
            f"{', '.join(computed) or 'float32 only'}. Pass one of these, tune on the device that will train, or ask "
            f"by what_if={casting.dtype!r} whether the model would survive in it.",
            PrecisionWarning,
        )
    search = _BatchSearch(batch, casting, tolerance, for_inference, what_if is not None, deny, allow)
    if casting is FLOAT32:
        return search.policy(**in_float32("float32 was asked for"))
    if not search.reference.finite:
        return search.policy(
            **in_float32("float32 itself is not finite on this batch: ask ampx.diagnose", agrees=False)
        )
    search.begin()
    return searched(search, 0 if casting.simulated else repeats)


def measured(clocks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return seconds by name, of clocks that take turns in changing order, after one time each that does not count."""
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for number in range(repeats + 1):
        for name in list(clocks)[:: -1 if number % 2 else 1]:
            seconds = clocks[name]()
            if number:
                times[name].append(seconds)
    return times
