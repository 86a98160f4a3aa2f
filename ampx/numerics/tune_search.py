"""The search for the smallest set that must stay in float32, over runs of a batch or of a script."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Generic, TypeVar

from ampx.errors import UnsupportedOpError

from .batch import FLOAT32, Seen, scaled
from .causes import Fault, find_fault
from .compare import bound, error_of, key_of
from .forcing import inside, is_part
from .operations import family, normalised
from .places import Place, is_low
from .probe import Reading
from .timing import ALIKE, best_speed, fastest, speed_in_words
from .tolerance import Distance, Tolerance
from .tuned_policy import TunedPolicy, entry_of, in_float32

# Beginnings of the order are tried that are so many times as long as the last.
GROWTH: Final = 4
# A run without a module, one in float32 and one with the module, whose operations are read, and one that tries another.
_LOOKS: Final = 4


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


@dataclass(frozen=True)
class Verdict:
    """What came of runs with a set in float32, and what the search goes on with.

    Attributes:
        failure: By what they are too far off; empty where they agree.
        step: In which step they fail.
        runs: How many runs that took.
        scale: The loss scale of the next run.
        flushes: A scale below the smallest was tried, and did not help.
    """

    failure: str
    step: int
    runs: int
    scale: float
    flushes: bool


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
        recalled: Verdicts of a search for the same that was interrupted: they take the place of runs.
        without: By module or operation that is kept, by what a run is too far off that lacks only this.
        hands_on: By entry that is kept for what fails outside of it, in words what and when that fails.
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
        self.recalled: Mapping[Kept, Verdict] = {}
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
            if kept in self.recalled:
                verdict = self.recalled[kept]
                self.runs += verdict.runs
            else:
                verdict = self._tried(kept)
                self.note(kept, verdict)
            self.failures[kept], self.step_of[kept] = verdict.failure, verdict.step
            self.scale, self._flushes = verdict.scale, verdict.flushes
        return self.failures[kept]

    def _tried(self, kept: Kept) -> Verdict:
        before = self.runs
        try:
            failure = self.failure(self.settled(kept))
        except UnsupportedOpError as error:
            failure = str(error)
        return Verdict(failure, self.step_of.get(kept, 1), self.runs - before, self.scale, self._flushes)

    def note(self, kept: Kept, verdict: Verdict) -> None:
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

    def unseen(self, kept: Kept) -> int:
        """Return how many runs `fault` takes."""
        step = self.step_of.get(kept, 1)
        return sum((each, step) not in self._looks for each in (kept, None))

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
        return self.reason(operation, "" if operation in self.hands_on else f"fails in {self.dtype}, {where}")

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
    if fault is None or place is None or not is_low(place) or is_part(place.module, name):
        return None
    step = search.step_of.get(kept.without(name), 1)
    if _is_wrong_before(search, fault, name, step):
        return None
    with_it = search.seen(kept, step).readings
    now = next((entry for entry in with_it if key_of(entry) == key_of(place)), None)
    is_wide = family(place.operation) == "cast" if now is None else not is_low(now)
    return fault if is_wide else None


def name_what_fails(search: Search[Any], kept: Kept) -> None:
    """Note what fails first without an entry, and is not of it, as far as there are runs left to look."""
    for name in [] if search.simulated else sorted(kept.entries - search.hands_on.keys()):
        fewer = kept.without(name)
        if not search.affords(len(kept.entries), search.unseen(fewer)):
            continue
        fault = search.fault(fewer)
        place = None if fault is None else fault.place
        if fault is None or place is None or is_part(place.module, name):
            continue
        if normalised(name) == normalised(place.operation):
            continue
        if not _is_wrong_before(search, fault, name, search.step_of.get(fewer, 1)):
            search.hands_on[name] = f"{Place.of(place)}, which fails without it"


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
    name_what_fails(search, kept)
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
    # With that module in float32 its output is, too. With another one in float32, what fails would be hidden.
    return needed(search, _in_front(search)) if outside else None, whole


def _in_front(search: Search[Any]) -> Sequence[str]:
    """Return the module that computed what a value that fails outside of modules is made of.

    Of a loss that is the last one to return before it, or what is in that and computed the same. Of a gradient it is
    the likeliest: that of its output fails first.
    """
    fault = None if search.simulated else search.fault(NOTHING)
    if fault is None or fault.place is None or fault.place.direction == "backward":
        return search.order[:1]
    before = [entry for entry in fault.readings[: fault.position] if not entry.operation]
    outputs = [entry for entry in before if entry.direction == "forward" and entry.module.rpartition(":")[2]]
    return [next(entry.module for entry in outputs if entry.value == outputs[-1].value)] if outputs else []


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


def not_faster(policy: TunedPolicy, times: Mapping[str, Sequence[float]]) -> str:
    """Return why float32 is preferred to a policy in low precision that agrees with it.

    Args:
        policy: The policy.
        times: As for `fastest`, of `"float32"` and of choices in low precision.
    """
    speed, best = best_speed(times)
    names = [choice.entry for choice in policy.deny]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    kept = f" with {', '.join(names[:3])}{more} in float32" if names else ""
    reason = f"{policy.dtype}{kept} agrees, and runs at {speed_in_words(best)} here"
    return reason if speed <= 1 + ALIKE else f"{reason}, which is within the spread; more repeats may decide"
