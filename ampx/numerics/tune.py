"""`ampx.tune`: which modules stay in float32, found by computing one batch again and again."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ampx import callers
from ampx.backend import CastPlan
from ampx.errors import InvalidOptionError, PrecisionWarning, UnsupportedOpError, shown
from ampx.formats import FORMATS
from ampx.session import listed

from .batch import FLOAT32, SAMPLES, Batch, Casting, Seen, fitting_scale, in_one_line, scaled
from .compare import Comparison, ModuleError, check_tolerance, compared, module_errors, unscaled, worst_errors
from .forcing import kept_in_float32, rounded_alone
from .operations import failing, family
from .probe import Replayed, Step, Watching
from .ranking import by_error, first_order
from .timing import is_undecided, measured, slow_modules
from .tolerance import RESOLUTION, Distance, Tolerance, by_count, by_rounding, percent, rounding, with_joined_gradients
from .tune_search import NOTHING, Kept, Search, minimal, searched
from .tuned_policy import Choice as Choice, TunedPolicy as TunedPolicy, entry_of, in_float32


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
            readings = unscaled(low.readings, scale, reference.readings)
            exact, other = map(with_joined_gradients, (reference.readings, readings))
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
