"""Find which modules must stay in float32, for safety and for speed, by measuring."""

from __future__ import annotations

import glob
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_args

from ampx import callers
from ampx.backend import MODULE, CastPlan
from ampx.errors import InvalidOptionError, PrecisionWarning, UnsupportedDtypeError, UnsupportedOpError, shown
from ampx.policy import Dtype, OptLevel, PolicyFile
from ampx.session import listed

from .batch import FLOAT32, SAMPLES, Batch, Casting, Seen, fitting_scale, plain, scaled
from .compare import Comparison, ModuleError, bound, check_tolerance, compared, relative_error
from .operations import failing, family
from .probe import Reading, Step, Watching
from .timing import speed_in_words

# Gradients that are further off than this are of another direction, whatever rounding explains.
LARGEST_TOLERANCE: Final = 0.25
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
        tolerance: Relative tolerance of loss and gradients.
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

        Raises:
            UnsupportedDtypeError: The dtype was simulated, and no framework trains in it.
        """
        accepted = get_args(Dtype)
        if self.dtype not in accepted:
            raise UnsupportedDtypeError(
                f"a policy in {self.dtype} cannot be used; accepted: {', '.join(accepted)}. It answers what would be; "
                f"tune without what_if for one that this device computes."
            )
        Path(path).write_text(self.file.text(), encoding="utf-8")

    def timed(self, ratios: Sequence[float], slow: Mapping[str, tuple[float, float]]) -> TunedPolicy:
        """Return the policy with its speed, and with modules in float32 that lose time in low precision.

        Args:
            ratios: Steps per second over those of float32, by round.
            slow: The modules, with their seconds in low precision and in float32.
        """
        choices = [
            Choice(_entry(name), f"{1e3 * low:.3g} ms in {self.dtype}, {1e3 * wide:.3g} ms in float32")
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


def minimal(names: Sequence[str], passes: Callable[[frozenset[str]], bool]) -> frozenset[str] | None:
    """Return a smallest set of names that passes, with few calls of `passes`.

    It is exact where every superset of a set that passes does so, too. Elsewhere it is a set that passes. Of `n` names
    of which `k` are needed it calls `passes` at most `2 k log2(n) + 10` times.

    Names that are needed are found one by one: that which completes the shortest beginning of `names` that passes is
    one. The length is searched in steps that double, so that names in front, the likely ones, are found in few calls.

    Args:
        names: All names, the likeliest first.
        passes: Returns whether a set is enough.

    Returns:
        The names; None where not even all together pass.
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
            failing, length = length, 2 * length
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


def by_error(modules: Sequence[str], errors: Sequence[ModuleError]) -> list[str]:
    """Return modules in the order in which they are likely to be needed in float32.

    Modules without others inside come first, that which adds most to the error in front; then those that hold others,
    the innermost first, for what they compute themselves.

    Args:
        modules: Names of all modules.
        errors: Of the values of modules, in order of execution.
    """
    holds = {name for name in modules if any(inside(other, name) for other in modules)}
    added: dict[str, float] = {}
    before = {"forward": 0.0, "backward": 0.0}
    for entry in errors:
        if entry.module in holds:
            continue
        last = before[entry.direction]
        step = 0.0 if math.isinf(last) else entry.error - last
        added[entry.module] = max(step, added.get(entry.module, 0.0))
        before[entry.direction] = entry.error
    leaves = sorted((name for name in modules if name not in holds), key=lambda name: -added.get(name, 0.0))
    inner = sorted(holds, key=lambda name: -name.count(".") if name else 1)
    return leaves + inner


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
    return reason if speed <= 1 + ALIKE else f"{reason}, which is not beyond the spread; more repeats may decide"


class _Tuning:
    """The search: one batch, its values in float32, and what must agree with them."""

    def __init__(self, batch: Batch, casting: Casting, tolerance: float | None, for_inference: bool) -> None:
        self.batch, self.casting, self.for_inference = batch, casting, for_inference
        self.watching = Watching(dtype=casting.dtype, samples=SAMPLES)
        self.reference = batch.run(watching=self.watching)
        self.scale = 1.0 if for_inference else fitting_scale(casting.dtype, self.reference)
        values = [entry for entry in self.reference.readings if not entry.operation and entry.direction == "forward"]
        self.modules = tuple(dict.fromkeys(entry.module for entry in values))
        self.output = values[-1].module if values else None
        # Where no module has a name, each parameter stands for one: an output, and the gradient of it.
        roundings = len(self.reference.readings) or 2 * len(self.reference.replayed.parameters)
        explained = min(LARGEST_TOLERANCE, bound(casting.dtype, roundings))
        self.tolerance = explained if tolerance is None else tolerance

    def policy(self, **chosen: Any) -> TunedPolicy:
        """Return a policy with fields that were chosen, and those of the search."""
        return TunedPolicy(
            self.batch.backend.name,
            self.batch.device.name,
            modules=self.modules,
            tolerance=self.tolerance,
            replays=self.batch.replays,
            **chosen,
        )

    def run(self, casting: Casting, watched: bool = False) -> Seen:
        """Compute the batch, watched where its outputs are needed."""
        if watched:
            return self.batch.run(casting, self.scale, self.watching)
        if self.for_inference and self.output is not None:
            return self.batch.run(casting, self.scale, replace(self.watching, modules=(glob.escape(self.output),)))
        return self.batch.run(casting, self.scale)

    def compare(self, low: Seen) -> Comparison:
        """Compare a run with float32."""
        return compared(
            (self.reference.replayed, self.reference.readings),
            (low.replayed, low.readings),
            self.casting.dtype,
            self.scale,
            self.casting.simulated,
        )

    def agrees(self, low: Seen) -> bool:
        """Return whether a run agrees with float32: loss and gradients, or for inference loss and output."""
        if not self.for_inference:
            whole = compared((self.reference.replayed, ()), (low.replayed, ()), self.casting.dtype)
            return whole.agrees(self.tolerance)
        outputs = [entry for entry in self.compare(low).modules if entry.module == self.output]
        loss = relative_error([low.replayed.loss], [self.reference.replayed.loss])
        errors = [entry.error for entry in outputs if entry.direction == "forward"]
        return max([loss, *errors]) <= self.tolerance

    def keeping(self, names: Iterable[str]) -> Casting:
        """Return the casting with modules in float32."""
        return replace(self.casting, forced={**self.casting.forced, **kept_in_float32(names, self.modules)})

    def denying(self, operations: Iterable[str]) -> Casting:
        """Return the casting with operations in float32."""
        plan = self.casting.plan
        if plan is None:
            return self.casting
        device, dtype, level = plan.device, plan.dtype, plan.level
        entries = (*plan.deny, *operations)
        return replace(
            self.casting, plan=self.batch.backend.check_plan(CastPlan(device, dtype, level, plan.allow, entries))
        )

    def lowers(self, casting: Casting) -> bool:
        """Return whether anything is computed in the dtype of a casting."""
        readings = self.batch.run(casting, self.scale, Watching(casting.dtype, operations=True)).readings
        return any(entry.dtype == casting.dtype and family(entry.operation) != "cast" for entry in readings)

    def failing_operations(self) -> tuple[str, ...]:
        """Return the operations of the forward pass that make what is not finite of what is finite."""
        if self.casting.plan is None:
            return ()
        return failing(self.batch.run(self.casting, self.scale, Watching(self.casting.dtype, operations=True)).readings)

    def agrees_without(self, operations: Iterable[str]) -> bool:
        """Return whether it is enough to keep operations in float32, wherever they are."""
        if not self.batch.backend.capabilities.op_lists:
            return False
        try:
            casting = self.denying(operations)
        except UnsupportedOpError:
            return False
        return self.agrees(self.run(casting))

    def operations(self) -> list[str]:
        """Return the operations that the batch runs and that can be denied, those that are not finite in front."""
        if self.casting.plan is None or not self.batch.backend.capabilities.op_lists:
            return []
        seen = self.batch.run(self.casting, self.scale, Watching(dtype=self.casting.dtype, operations=True))
        readings = sorted(
            (entry for entry in seen.readings if entry.operation), key=lambda entry: -entry.value.nonfinite
        )
        names = []
        for name in dict.fromkeys(entry.operation for entry in readings):
            try:
                self.denying([name])
            except UnsupportedOpError:
                continue
            names.append(name)
        return names


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
    agree with float32's and all is finite, then so that no time is lost. Nothing is stepped.

    Args:
        step: A function that takes the model and returns the loss of one batch, without a backward.
        model: The model; its parameters where these are a value (JAX).
        tolerance: How far loss and gradients may be from float32's, relative to their norm; by default what rounding
            explains, as in `compare`, and at most a quarter.
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
        The policy, every choice with what was measured.

    Raises:
        UnsupportedDtypeError: The device neither computes nor simulates the dtype.
        UnsupportedByBackendError: The backend does not watch, force or replay.
        InvalidOptionError: `tolerance` or `repeats` is out of range.

    Sync: many.
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
    if casting is FLOAT32:
        return _Tuning(batch, casting, tolerance, for_inference).policy(**in_float32("float32 was asked for"))
    tuning = _Tuning(batch, casting, tolerance, for_inference)
    if not tuning.reference.finite:
        reason = "float32 itself is not finite on this batch: ask ampx.diagnose"
        return tuning.policy(**in_float32(reason, agrees=False))
    fixed = [Choice(str(entry), "asked for") for entry in deny]
    low = tuning.run(casting, watched=True)
    comparison = tuning.compare(low)
    order = by_error(tuning.modules, comparison.modules)
    first = [tuning.agrees(low)]  # the search asks first what was just computed
    kept = minimal(order, lambda names: first.pop() if first else tuning.agrees(tuning.run(tuning.keeping(names))))
    whole = kept is not None and "" in kept  # which is float32, but for what stands outside of the model
    if kept is not None and not whole:
        safe = tuning.keeping(kept)
        every = len(comparison.modules)
        errors = [*comparison.worst("backward", every), *comparison.worst("forward", every)]
        worst = {entry.module: entry for entry in errors}
        denied = [Choice(_entry(name), _of_error(worst.get(name), casting.dtype)) for name in order if name in kept]
        failing = tuning.failing_operations() if kept else ()
        instead = failing if failing and tuning.agrees_without(failing) else ()
    else:
        operations = minimal(
            tuning.operations(), lambda names: bool(names) and tuning.agrees(tuning.run(tuning.denying(names)))
        )
        if operations is None or not tuning.lowers(tuning.denying(operations)):
            whole = whole or operations is not None
            kind = "nothing less than the whole model" if whole else "nothing that can be kept"
            reason = f"{kind} in float32 brings the result within {tuning.tolerance:.2g} of float32's"
            return tuning.policy(**in_float32(reason, agrees=what_if is None))
        safe = tuning.denying(operations)
        instead = ()
        denied = [Choice(name, f"fails in {casting.dtype}, outside of modules") for name in sorted(operations)]
    simulated = ""
    if casting.simulated:
        refused = "" if casting.dtype in computed else f", where init refuses {casting.dtype}"
        simulated = f", simulated on {batch.device.name}{refused}"
    policy = tuning.policy(
        dtype=casting.dtype,
        level="O1",
        loss_scale="dynamic" if scaled(casting.dtype) and not for_inference else 1.0,
        deny=(*fixed, *denied),
        allow=tuple(Choice(str(entry), "asked for") for entry in allow),
        reasons={
            "dtype": f"loss and {'output' if for_inference else 'gradients'} agree with float32's within "
            f"{tuning.tolerance:.2g}{simulated}",
            "level": "casting by the framework's op lists; the parameters stay in float32",
            "loss_scale": f"the largest scale whose gradients fit is at least {tuning.scale:g} on this batch"
            if scaled(casting.dtype)
            else f"{casting.dtype} has the exponents of float32",
        },
        operations=instead,
    )
    if repeats and not casting.simulated:
        policy = _for_speed(tuning, policy, safe, repeats)
    return replace(policy, replays=batch.replays)


def _entry(name: str) -> str:
    return MODULE + glob.escape(name)


def _of_error(error: ModuleError | None, dtype: str) -> str:
    if error is None:
        return f"float32 is needed here for the loss to agree; {dtype} shows no error of its own"
    if math.isinf(error.error):
        return f"not finite in {dtype}"
    return f"its output is off by {error.error:.2g} of its norm in {dtype}"


def _for_speed(tuning: _Tuning, policy: TunedPolicy, safe: Casting, repeats: int) -> TunedPolicy:
    """Return a policy that is not slower than float32: without the modules that lose time, or without any casting."""
    watching = Watching(times=True)
    low: list[Sequence[Reading]] = []
    wide: list[Sequence[Reading]] = []
    for _ in range(0 if tuning.batch.probe.watches_uncompiled else repeats):
        low.append(tuning.batch.run(safe, tuning.scale, watching).readings)
        wide.append(tuning.batch.run(FLOAT32, 1.0, watching).readings)
    denied = {choice.entry for choice in policy.deny}
    slow = {name: times for name, times in slow_modules(low, wide).items() if _entry(name) not in denied}
    # The simplest in front: where nothing pays, nothing is cast.
    castings = {"float32": FLOAT32, "safe": safe}
    leaves = [name for name in tuning.modules if not any(inside(other, name) for other in tuning.modules)]
    if slow and any(name not in slow and _entry(name) not in denied for name in leaves):  # else nothing is left to cast
        castings["tuned"] = replace(safe, forced={**safe.forced, **kept_in_float32(slow, tuning.modules)})
        if not tuning.agrees(tuning.run(castings["tuned"])):
            del castings["tuned"]
    clocks = {name: tuning.batch.clock(casting) for name, casting in castings.items()}
    times = measured(clocks, repeats)
    if is_undecided(times):  # on a busy machine; a step in code is cheap
        more = measured(clocks, 3 * repeats)
        times = {name: [*seconds, *more[name]] for name, seconds in times.items()}
    choice = fastest(times)
    if choice == "float32":
        return tuning.policy(**in_float32(not_faster(policy, times), speed=1.0))
    ratios = [mine / other for mine, other in zip(times["float32"], times[choice], strict=True)]
    return policy.timed(ratios, slow if choice == "tuned" else {})


def measured(clocks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return seconds by name, of clocks that take turns in changing order, after one time each that does not count."""
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for number in range(repeats + 1):
        for name in list(clocks)[:: -1 if number % 2 else 1]:
            seconds = clocks[name]()
            if number:
                times[name].append(seconds)
    return times
