"""`ampx diagnose`: the step of an unedited script that fails, run again with watchers, in its dtype and in float32."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from ampx.backend import Array
from ampx.errors import TrialError
from ampx.formats import digits_of
from ampx.modules import owner_of
from ampx.run import RunSettings, SampledGradient
from ampx.run.page import origin
from ampx.run.program import Program

from .batch import INIT_SCALE, Refusal, Seen, plain, scaled
from .causes import Fault, Growth, loss_error
from .compare import bound, by_key, carries_scale, key_of, listed_names, module_errors, unscaled
from .cures import Change, entry_in_every_model
from .diagnose import SAMPLES, Diagnosis, Setting, Suspect, examined
from .forcing import kept_in_float32
from .meter import LOST
from .places import WRONG, Place, cast_by_hand, of_the_step, outermost
from .probe import Reading, Replayed, Stats, Watching
from .rounding import describe, is_rounded
from .tolerance import Distance, by_rounding, percent, rounding
from .trial import DIFFERS, GROWN, Outcome, Trial, run_trial

SCHEMA: Final = "ampx.diagnose/1"
_LOW: Final = ("float16", "bfloat16")  # in which weights may be stored
_BEFORE: Final = (1, 2, 4, 8)  # steps before the one that fails, for the map
_ALIKE: Final = 4.0  # the largest number of one batch over that of another of the same size
# Where nothing fails this step is looked at, or the last before it that was not skipped: early, to cost little.
_HEALTHY: Final = 20
# No gradient times this loss scale is finite in float16, so that no step is made.
_SKIPS_ALL: Final = 2.0**127
# By so much later gradients may be larger than those at which the loss scale has settled.
ROOM: Final = 4.0
# A cure lets training go on for so many steps, where the script makes them.
_LATER: Final = 3


def diagnose_script(
    program: Program,
    settings: RunSettings,
    *,
    framework: str | None = None,
    at: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    run: Callable[[Trial], Outcome] = run_trial,
    progress: Callable[[str], Any] = lambda text: None,
) -> tuple[Diagnosis | None, dict[str, Any]]:
    """Return the diagnosis, None where nothing failed, and the report, whose layout docs/reference/json.md tells.

    Where nothing fails, an early step is looked at all the same: for a loss that is finite and wrong, and for risks.

    Args:
        program: The script.
        settings: As for `ampx run`.
        framework: The only framework to automate.
        at: The step to look at; by default the first with a loss that is not finite, in which the scale collapses, or
            that raises; else the first of the last that were skipped in a row, where half of all were; else the first
            that is skipped at a settled loss scale, too.
        steps: How many steps to wait for that; by default all that the script makes.
        seed: What random numbers start from.
        run: Runs a trial.
        progress: Is called with what is done now.

    Raises:
        TrialError: A run failed, or did not come to the step, or the backend cannot watch.
    """
    trial = Trial(program, settings, framework, seed, steps, stop_at_fault=True, shares_compiled=True, may_raise=True)
    notes: list[str] = []
    first = None
    step, what = at, "asked for"
    if at is None:
        progress(f"{program.name}: waiting for a loss that is not finite, a collapse of the scale, or an exception …")
        first = run(trial)
        trial = replace(trial, imported=first.imported)
        notes += [*_off(settings, first), *first.notes]
        if first.fault is not None:
            step, what = first.fault
        elif first.raised is not None:
            step, what = first.steps + 1, "exception"
        elif 2 * len(first.skipped) >= first.steps:  # which trains nothing, though no loss fails
            return _look_at_skipped(trial, first, notes, run, progress)
        elif first.dtype == "float32" or not first.watches:
            return None, _report(trial, first, notes)
        else:
            skipped = _look_at_lasting_skip(trial, first, notes, run, progress)
            return skipped or _look_where_losses_part(trial, first, notes, run, progress)
    assert step is not None
    return _look_at(trial, step, what, first, notes, run, progress)


def _look_at_skipped(
    trial: Trial, first: Outcome, notes: list[str], run: Callable[[Trial], Outcome], progress: Callable[[str], Any]
) -> tuple[Diagnosis | None, dict[str, Any]]:
    """Look at the first of the last skipped steps in a row; or at the last, if only the loss scale is why that was.

    See `_look_at` for the arguments.
    """
    last = first.skipped[-1]
    begins = next(step for step in range(last, 0, -1) if step - 1 not in first.skipped)
    diagnosis, report = _look_at(trial, begins, "skipped", first, [*notes], run, progress)
    only_scaled = diagnosis is not None and diagnosis.kind == "loss scale" and begins != last
    return _look_at(trial, last, "skipped", first, notes, run, progress) if only_scaled else (diagnosis, report)


def _look_at_lasting_skip(
    trial: Trial, first: Outcome, notes: list[str], run: Callable[[Trial], Outcome], progress: Callable[[str], Any]
) -> tuple[Diagnosis, dict[str, Any]] | None:
    """Look at the first step that is skipped at a loss scale, too, at which training has settled.

    None where there is none, or only the loss scale is why. See `_look_at` for the arguments.
    """
    if not first.skipped:
        return None
    scale = settled_scale(first)
    progress(f"{trial.program.name}: {first.skipped[-1]} steps at a loss scale of {scale:g}, for steps were skipped …")
    fixed = replace(trial, settings=replace(trial.settings, loss_scale=scale), stop_at_fault=False)
    try:
        lasting = run(replace(fixed, steps=first.skipped[-1])).skipped
    except TrialError:
        return None
    if not lasting:
        return None
    diagnosis, report = _look_at(fixed, lasting[0], "skipped", first, [*notes], run, progress)
    return None if diagnosis is None or diagnosis.kind in ("loss scale", "healthy") else (diagnosis, report)


def settled_scale(outcome: Outcome) -> float:
    """Return a loss scale at which no step is lost to settling: somewhat smaller than that at the end."""
    return max(1.0, (outcome.last_scale or 1.0) / ROOM)


def _look_where_losses_part(
    trial: Trial, first: Outcome, notes: list[str], run: Callable[[Trial], Outcome], progress: Callable[[str], Any]
) -> tuple[Diagnosis | None, dict[str, Any]]:
    """Look at the first step whose loss is wrong; or else at the early one that parts most from float32's, or the last.

    See `_look_at` for the arguments.
    """
    try:
        parting = Parting({})
        if any(loss is not None for loss in first.losses):
            progress(f"{trial.program.name}: {first.steps} steps in float32, whose losses are compared …")
            settings = replace(trial.settings, dtype="float32")
            same = replace(trial, settings=settings, steps=first.steps, stop_at_fault=False)
            parting = Parting.of(run(same), first, noise_of(same, first.dtype, run, progress))
        step = parting.step(first)
        if step is None:
            return None, _report(trial, first, notes)
        return _look_at(trial, step, "", first, notes, run, progress, parting)
    except TrialError as error:
        notes.append(f"What may do harm elsewhere was not looked for: {error}")
        return None, _report(trial, first, notes)


@dataclass(frozen=True)
class Parting:
    """How far the losses of a run are from float32's, each relative to the largest so far.

    Attributes:
        off: By step, as far as that is known.
        limits: By step, how far rounding alone explains, where that was measured.
        rates: The first step with another learning rate than in float32, by what the script decided, and both rates;
            None for none.
    """

    off: Mapping[int, float]
    limits: Mapping[int, float] = field(default_factory=dict)
    rates: tuple[int, float, float] | None = None

    @classmethod
    def of(cls, exact: Outcome, low: Outcome, noise: Noise) -> Parting:
        """Return it, with its limits where some loss may be wrong, and none is wrong by any measure.

        Args:
            exact: The run in float32.
            low: The run.
            noise: What rounding alone does to the script.
        """
        off, least = losses_off(exact, low), bound(low.dtype, 0)
        largest = max(off.values(), default=0.0)
        rates = rates_part(exact, low) if least < largest else None
        runs = noise() if rates is not None or least < largest <= WRONG else None
        if runs is None:
            return cls(off, rates=rates)
        rates = None if rates_part(*runs) else rates  # a schedule that turns on a rounding
        apart = losses_off(*runs)
        noises = zip(off, itertools.accumulate((apart.get(step, math.inf) for step in off), max), strict=True)
        limits = {step: max(least, by_rounding(low.dtype, Distance(noise)).loss) for step, noise in noises}
        # The weights of the first step are the same: if rounding alone moves its loss so far, rounding is the fault.
        return cls(off, limits if limits.get(1) != WRONG else {**limits, 1: least}, rates)

    def limit(self, step: int) -> float:
        """Return how far the loss of a step may be off."""
        return self.limits.get(step, WRONG)

    def is_wrong(self, step: int) -> bool:
        """Return whether the loss of a step is off by more."""
        return self.off.get(step, 0.0) > self.limit(step)

    def step(self, low: Outcome) -> int | None:
        """Return the first step whose loss is wrong; or else the early one that parts most from float32's, or the last.

        None where every early one was skipped. Where the learning rate was another before a loss is wrong, that step.
        """
        early = set(range(1, min(low.steps, _HEALTHY) + 1)) - set(low.skipped)
        parts = {step: error for step, error in self.off.items() if error > bound(low.dtype, 0)}
        furthest = max(early, key=lambda step: (parts.get(step, 0.0), step), default=None)
        wrong = next(filter(self.is_wrong, self.off), None)
        if wrong is not None and self.rates is not None and self.rates[0] <= wrong:
            return self.rates[0]
        return furthest if wrong is None else wrong

    def decides(self, step: int, dtype: str) -> str:
        """Return in words what the script decided otherwise in a step; "" for nothing."""
        return "" if self.rates is None or self.rates[0] != step else decided(self.rates, dtype)


# Returns two runs that differ by rounding alone; None where one cannot be made.
Noise: TypeAlias = Callable[[], "Sequence[Outcome] | None"]


def noise_of(trial: Trial, dtype: str, run: Callable[[Trial], Outcome], progress: Callable[[str], Any]) -> Noise:
    """Return what runs a script twice in float32, which rounds what modules take and return; it does so once.

    One run rounds to the digits of a dtype, the other to one less.

    Args:
        trial: A run of it.
        dtype: The low precision.
        run: Runs a trial.
        progress: Is called with what is done now.
    """
    exact = replace(trial, settings=replace(trial.settings, dtype="float32"))

    @functools.cache
    def noise() -> list[Outcome] | None:
        outcomes = []
        for seed in range(2):
            progress(f"{trial.program.name} in float32, rounded as {dtype} …")
            try:
                outcomes.append(run(replace(exact, forced=rounding(dtype, seed))))
            except TrialError:
                return None
        return outcomes

    return noise


def rates_part(exact: Outcome, low: Outcome) -> tuple[int, float, float] | None:
    """Return the first step with another learning rate than in float32, and both rates; None for none, or unknown.

    Behind the first skipped step that is not known, as of losses.
    """
    least = bound(low.dtype, 0)
    for step, rates in enumerate(zip(exact.rates, low.rates[: min(low.skipped, default=None)], strict=False), 1):
        for wide, own in zip(*rates, strict=False):
            if abs(own - wide) > least * abs(wide):
                return step, own, wide
    return None


def decided(rates: tuple[int, float, float], dtype: str) -> str:
    """Return in words what `rates_part` returns."""
    _, low, exact = rates
    return (
        f"the learning rate is {low:.2g}, and in float32 {exact:.2g}: the script's schedule may decide by a number "
        f"that was computed in {dtype}"
    )


def losses_off(reference: Outcome, low: Outcome) -> dict[int, float]:
    """Return by step how far its loss is from float32's, as `loss_error` has it.

    Behind the first skipped step that is not known: float32 has made it.
    """
    off, largest = {}, 0.0
    pairs = zip(reference.losses, low.losses[: min(low.skipped, default=None)], strict=False)
    for step, (exact, loss) in enumerate(pairs, 1):
        if exact is not None and loss is not None and math.isfinite(exact) and math.isfinite(loss):
            largest = max(largest, abs(exact))
            off[step] = abs(loss - exact) / largest if largest else 0.0
    return off


def _look_at(
    trial: Trial,
    step: int,
    what: str,
    first: Outcome | None,
    notes: list[str],
    run: Callable[[Trial], Outcome],
    progress: Callable[[str], Any],
    parting: Parting | None = None,
) -> tuple[Diagnosis | None, dict[str, Any]]:
    """Look at a step: see `diagnose_script`.

    Args:
        trial: The run that came to it.
        step: The step.
        what: Why it; "" where nothing failed.
        first: What was seen of that run; None where the user named the step.
        notes: What is to be said besides, to which this adds.
        run: Runs a trial.
        progress: Is called with what is done now.
        parting: How far losses are from float32's; None for unknown.
    """
    parting = parting or Parting({})
    runs = Runs(trial, step, run, progress, parting=parting)
    low = runs.run("watched")
    if what == "loss" and first is not None and math.isfinite(_loss(low, step)):
        notes.append(f"The loss was finite when the step was run again: the script {DIFFERS}.")
    diagnosis, reference = runs.examined(low)
    low_step, exact_step = runs.seen(low), runs.of_values(_seen(reference, step), reference)
    if isinstance(low_step, Seen):
        notes += [*_off(trial.settings, low), *low.notes, *reference.notes]
    notes += lost_updates(low)
    rounded = rounded_weights(low, runs.whole)
    if rounded and diagnosis.kind == "healthy":
        words = rounding_in_words(rounded, low.dtype)
        notes.append(f"{words[0].upper()}{words[1:]}.")
    agreement = _agreement(low_step, exact_step, low.dtype, low.scale_at(step), parting.limit(step))
    look = _Look(step, what, low, exact_step.readings, diagnosis, agreement, parting)
    return (diagnosis if look.fails else None), _report(trial, first or low, notes, look)


class Runs:
    """Runs of a script up to one step, in which it is watched."""

    def __init__(
        self,
        trial: Trial,
        step: int,
        run: Callable[[Trial], Outcome],
        progress: Callable[[str], Any],
        whole: Outcome | None = None,
        parting: Parting | None = None,
    ) -> None:
        """Start with nothing run but what `whole` returns, if that is known; for the other arguments see `_look_at`."""
        self._step, self._run, self._progress = step, run, progress
        self._parting = parting or Parting({})
        self._whole = whole
        self._rounded: Mapping[str, int] = {}  # as `rounded_weights` returns them, where nothing else is wrong
        before = tuple(sorted({1, *(max(1, step - distance) for distance in (0, *_BEFORE))}))
        self._trial = replace(
            trial,
            settings=replace(trial.settings, watched=True, meter_every=step),
            steps=step,
            watched=before,
            gradients=before,
            watching=Watching("float16", operations=True, samples=SAMPLES),
            operations_in=(),
            stop_at_fault=False,
        )

    def examined(self, low: Outcome) -> tuple[Diagnosis, Outcome]:
        """Return the diagnosis of the step, and the run in float32 that it was compared with.

        Args:
            low: The run that fails, watched as `run` does, with the operations of the step.
        """
        dtype, step = low.dtype, self._step
        low_step = self.seen(low)
        reference = low if dtype == "float32" else self.reference(low)
        exact_step = self.seen(reference)
        if isinstance(exact_step, Refusal):
            raise TrialError(
                f"{self._trial.program.name} raises after {reference.steps} steps in float32, too: "
                f"{' in '.join(reference.raised or ())}; accepted: a script that trains in float32. Mend that first: "
                f"float32 does not cure it."
            )
        exact_step = self.of_values(exact_step, reference)
        # Whether training diverges is asked of float32 from the first step on, whatever the step is compared with.
        fails = isinstance(low_step, Refusal) or not low_step.finite
        parts = self._parting.is_wrong(step)
        self._rounded = rounded_weights(low, self.whole) if parts and not fails else {}
        batch = Suspect(
            exact_step if reference is low else low_step,
            exact_step,
            Setting(dtype, self._scale(low), low.prepare_finds_modules),
            self.changed,
            self.compared,
            growth=self._growth(low) if fails else None,
            parts=parts,
            decides=self._parting.decides(step, dtype),
            weights=self._of_weights(low_step, dtype),
        )
        if self._rounded and batch.fault() is not None:
            self._rounded = {}
        diagnosis = examined(batch)
        fault = self._of_weights(low_step, dtype, diagnosis.deny) if diagnosis.deny else None
        if fault is not None:
            place = None if fault.place is None else Place.of(fault.place)
            diagnosis = replace(diagnosis, last_finite=None, first_nonfinite=place)
        return diagnosis, reference

    def _of_weights(self, step: Seen | Refusal, dtype: str, deny: Sequence[str] = ()) -> Fault | None:
        """Say that the run rounds weights, if it does, at their module or at one around it that cures it in float32."""
        if not self._rounded or isinstance(step, Refusal):
            return None
        entries = [entry for entry in step.readings if not deny or entry_in_every_model(entry.module) in deny]
        return rounding_fault(entries, self._rounded, dtype)

    def _scale(self, low: Outcome) -> float:
        """Return the loss scale of the step; that with which training begins where the script raised before that."""
        if low.run["optimizers"] or low.raised is None:
            return low.scale_at(self._step)
        fixed = self._trial.settings.loss_scale
        return float(fixed) if isinstance(fixed, (int, float)) else INIT_SCALE if scaled(low.dtype) else 1.0

    def _growth(self, low: Outcome) -> Growth | None:
        """Return how far training has diverged in float32; None where it fails with the weights of the first step."""
        growth = _growth(low if low.dtype == "float32" else self.whole(), self._step)
        if growth is None:
            return None
        try:
            unscalable = {"dtype": "float16", "loss_scale": _SKIPS_ALL}
            outcome = self.run("without updates", {"watched": (self._step,)}, **unscalable)
        except TrialError:
            return growth
        loss, has_updates = _loss(outcome, self._step), set(range(1, self._step)) - set(outcome.skipped)
        if not has_updates and math.isfinite(loss):
            return replace(growth, untrained=loss)
        return growth if has_updates or low.dtype != "float16" else None

    def run(self, words: str, trial: Mapping[str, Any] | None = None, **settings: Any) -> Outcome:
        """Run the script with changes to the trial and to its settings."""
        self._progress(f"{self._trial.program.name}: step {self._step} again, {words} …")
        changed = replace(self._trial, settings=replace(self._trial.settings, **settings), **(trial or {}))
        outcome = _reach(changed, self._step, self._run)
        self._trial = replace(self._trial, imported=self._trial.imported or outcome.imported)
        return outcome

    def seen(self, outcome: Outcome) -> Seen | Refusal:
        """Return the step of a run as a replay, or what it raised."""
        limit = self._parting.limit(self._step)
        return _refusal(outcome, self._step) or replace(_seen(outcome, self._step), tolerance=limit)

    def reference(self, low: Outcome) -> Outcome:
        """Run the step in float32.

        A finite loss is compared with that of the same weights and state: casting is off in that step only. Whether
        float32 fails, or raises, is asked of a run that is in float32 from its first step: what crosses steps is not
        half of each.
        """
        if self._step > 1 and math.isfinite(_loss(low, self._step)):
            only = {"float32": (self._step,), "watched": (self._step,)}
            same = self.run("with casting off", only, dtype=low.dtype)
            seen = self.seen(same)
            if isinstance(seen, Seen) and seen.finite:
                return same
        return self.whole()

    def whole(self) -> Outcome:
        """Run the script in float32 from its first step, once."""
        if self._whole is None:
            steps = 1, self._step
            both = {"watched": steps, "gradients": steps, "steps": self._step + _LATER}
            self._whole = self.run("in float32 from the first step on", both, dtype="float32")
        return self._whole

    def of_values(self, seen: Seen, reference: Outcome) -> Seen:
        """Return the step in float32 with the gradients of its values: with casting off in one step, they are scaled.

        Those that a loss is made of are not, and are computed before it is: the run that scales nothing tells them.
        """
        scale, forward = reference.scale_at(self._step), [entry.direction == "forward" for entry in seen.readings]
        may_be_inside = scale != 1 and not all(forward[: forward.count(True)])
        others = by_key(self.whole().readings.get(self._step, ()) if may_be_inside else ())
        readings = (_of_value(entry, scale, others.get(key_of(entry))) for entry in seen.readings)
        return replace(seen, readings=tuple(readings))

    def compared(self) -> Seen:
        """Return the step of the run that is in float32 from its first step: a change holds in all steps, too."""
        seen = self.seen(self.whole())
        if isinstance(seen, Refusal):
            raise TrialError(f"{self._trial.program.name} raises in float32 from its first step on: {seen.message}")
        return seen

    def changed(self, change: Change, modules: Sequence[str]) -> Seen | Refusal:
        """Run the step with a change; `modules` are the names of all."""
        forced = _in_every_model(change.float32, modules)
        if change.rounded:
            forced |= dict.fromkeys(_in_every_model((change.rounded,), modules), digits_of(change.bits))
        trial = {"forced": forced, "watched": (self._step,), "steps": self._step + _LATER}
        settings: dict[str, Any] = {"loss_scale": change.scale, "dtype": change.dtype}
        if change.operations:
            settings["deny"] = (*self._trial.settings.deny, *change.operations)
        try:
            outcome = self.run(
                str(change), trial, **{name: value for name, value in settings.items() if value is not None}
            )
        except TrialError as error:
            return Refusal(str(error).splitlines()[0])
        seen = self.seen(outcome)
        if isinstance(seen, Refusal):
            return seen
        if self._parting.rates is not None and rates_part(self.whole(), outcome) is not None:
            return Refusal("the learning rate is another than in float32")
        if self._rounded and rounded_weights(outcome, self.whole):
            return Refusal("weights are still rounded")
        fails = _fails_after(outcome, self._step) and not _diverges_after(self.whole(), self._step)
        return replace(seen, fails_later=fails)


def _in_every_model(names: Sequence[str], modules: Sequence[str]) -> dict[str, str]:
    """Return what `Probe.force` takes to compute modules in float32, of every model that has one of that name.

    So does what is advised. Which model has plain names depends on what is called first, which in a step need not be
    what is called first in the run. A model as a whole is named by its class.
    """
    models = [name for name in names if name.endswith(":")]
    own, everywhere = ([name.rpartition(":")[2] for name in several] for several in (names, modules))
    forced = kept_in_float32(filter(None, own), everywhere)
    return {
        **kept_in_float32(models, modules),
        **forced,
        **{f"*:{pattern}": dtype for pattern, dtype in forced.items()},
    }


def _growth(outcome: Outcome, step: int) -> Growth | None:
    """Return how far a run in float32 has diverged: its loss, and what a module makes of a batch of the same size."""
    looked_at = [at for at in sorted(outcome.readings) if at <= step]
    if len(looked_at) < 2:
        return None
    since, now = looked_at[0], looked_at[-1]
    before, losses = abs(_loss(outcome, since)), [abs(_loss(outcome, at)) for at in range(since + 1, step + 1)]
    loss = max(filter(math.isfinite, losses), default=math.inf)
    first, last = outcome.readings[since], outcome.readings[now]
    outputs, later = _largest_outputs(first), _largest_outputs(last)
    factors = {name: later[name] / outputs[name] for name in outputs.keys() & later.keys() if outputs[name]}
    alike = {name: factor for name, factor in factors.items() if _receives_alike(first, last, name)}
    module = max(alike, key=lambda name: alike[name], default="")
    if not before or loss < GROWN * before or alike.get(module, 0.0) < GROWN:
        return None
    return Growth(since, alike[module], module, before, loss, rates=_grown_rates(outcome, since, now))


def _grown_rates(outcome: Outcome, since: int, now: int) -> tuple[float, float] | None:
    """Return the learning rates of two steps of one optimizer, where that has grown; None where that is not known."""
    steps = list(zip(outcome.losses_of, outcome.rates, strict=False))
    if now > len(steps) or steps[since - 1][0] != steps[now - 1][0]:
        return None
    before, after = (max(steps[at - 1][1], default=0.0) for at in (since, now))
    return (before, after) if after > before else None


def _receives_alike(first: Sequence[Reading], last: Sequence[Reading], module: str) -> bool:
    """Return whether the model of a module receives no larger numbers than before, as far as that is known."""
    before, now = outermost(first, module), outermost(last, module)
    if before is None or now is None:
        return False
    return now.inputs.largest <= _ALIKE * before.inputs.largest and not now.inputs.nonfinite


def _largest_outputs(readings: Sequence[Reading]) -> dict[str, float]:
    outputs: dict[str, float] = {}
    for entry in readings:
        if entry.direction == "forward" and not entry.operation:
            outputs[entry.module] = max(entry.value.largest, outputs.get(entry.module, 0.0))
    return outputs


def _off(settings: RunSettings, outcome: Outcome) -> list[str]:
    """Return a sentence where mixed precision was asked for, and is off."""
    if outcome.dtype != "float32" or settings.dtype == "float32":
        return []
    named = f" Name what this device computes: --dtype {' or '.join(outcome.native)}." if outcome.native else ""
    return [
        f"Nothing was computed in low precision: {outcome.run['reason']}.{named} What a dtype would do is simulated by "
        f"`ampx tune --what-if float16`."
    ]


def _reach(trial: Trial, step: int, run: Callable[[Trial], Outcome]) -> Outcome:
    outcome = run(trial)
    if not outcome.watches:
        raise TrialError(
            f"nothing of {trial.program.name} could be watched; accepted: a script that leaves mixed precision to "
            f"`ampx run`, and a backend that offers the probe (`ampx backends`). "
            f"{' '.join(outcome.run['notes'])}".rstrip()
        )
    if outcome.raised is not None and outcome.steps + 1 == step:
        return outcome
    if step not in outcome.readings:
        raised = f": it raised {' in '.join(outcome.raised)}" if outcome.raised else ""
        raise TrialError(
            f"{trial.program.name} made {outcome.steps} steps and did not come to step {step} on its own{raised}; "
            f"accepted: a step that it makes, and a program whose steps are separate calls. Name another by --at."
        )
    if not outcome.readings[step]:
        raise TrialError(
            f"step {step} of {trial.program.name} ran, and nothing in it could be watched; accepted: modules that "
            f"Python calls in the step. Graphs of TensorFlow 1 and Paddle's static programs run without Python: ask "
            f"ampx.diagnose about a batch, with the model as layers."
        )
    return outcome


def _loss(outcome: Outcome, step: int) -> float:
    """Return the loss of a step; NaN for none of a step that was skipped or raised, 0 for none of another."""
    loss = outcome.losses[step - 1] if step <= len(outcome.losses) else None
    if loss is None:
        raised = outcome.raised is not None and outcome.steps < step
        return math.nan if raised or step in outcome.skipped else 0.0
    return loss


def _seen(outcome: Outcome, step: int) -> Seen:
    """Return a step of a script as a replay."""
    trained = outcome.gradients.get(step, ())
    gradients = {entry.name: entry.values for entry in trained if entry.values is not None}
    replayed = Replayed(_loss(outcome, step), gradients, _weights(trained))
    losses = (abs(loss) for loss in outcome.losses[:step] if loss is not None and math.isfinite(loss))
    skipped = step in outcome.skipped
    return Seen(replayed, of_the_step(outcome.readings[step]), skipped, max(losses, default=0.0))


def _weights(trained: Sequence[SampledGradient]) -> dict[str, Stats]:
    """Return the numbers of the samples of weights: in JAX also those by which a step differentiates before its update.

    Of these only what an update trains are weights.
    """
    updated = {(entry.name, entry.shape) for entry in trained if entry.values is not None}
    samples: dict[str, list[Array]] = {}
    for entry in trained:
        if entry.weights is not None and (entry.name, entry.shape) in updated:
            samples.setdefault(entry.name, []).append(entry.weights)
    return {name: describe(np.concatenate(own)) for name, own in samples.items()}


def _of_value(entry: Reading, scale: float, other: Reading | None) -> Reading:
    """Return a reading without the loss scale, where it carries that."""
    if not carries_scale(entry, scale, other):
        return entry
    value = replace(
        entry.value, **{name: getattr(entry.value, name) / scale for name in ("largest", "smallest", "lowest")}
    )
    return replace(entry, value=value, sample=None if entry.sample is None else entry.sample / np.float32(scale))


def _fails_after(outcome: Outcome, step: int) -> bool:
    """Return whether a run raised behind a step, had a loss that is not finite, or skipped all steps there."""
    later = set(range(step + 1, outcome.steps + 1))
    broken = any(loss is not None and not math.isfinite(loss) for loss in outcome.losses[step:])
    return outcome.raised is not None or broken or (bool(later) and later <= set(outcome.skipped))


def _diverges_after(outcome: Outcome, step: int) -> bool:
    """Return whether a run in float32 fails behind a step, too, or its loss grows there beyond what it was."""
    largest = max((abs(loss) for loss in outcome.losses[:step] if loss is not None), default=0.0)
    grows = any(loss is not None and abs(loss) > GROWN * largest for loss in outcome.losses[step:])
    return grows or _fails_after(outcome, step)


def _refusal(outcome: Outcome, step: int) -> Refusal | None:
    """Return what a step raised; None where it did not, or of values that were not finite."""
    readings = of_the_step(outcome.readings.get(step, ()))
    if outcome.raised is None or outcome.steps >= step or any(entry.value.nonfinite for entry in readings):
        return None
    message, line = outcome.raised
    return Refusal(message, readings, line)


def _skips(skipped: Sequence[int]) -> str:
    count = "1 step was skipped" if len(skipped) == 1 else f"{len(skipped)} steps were skipped"
    return f"{count} (--at {skipped[0]} looks at the first)" if skipped else count


def _map(low: Outcome) -> dict[str, Any]:
    """Return by module and watched step the largest magnitude of its output; None where it is not finite."""
    columns = {step: _finite_outputs(readings) for step, readings in sorted(low.readings.items())}
    modules = list(dict.fromkeys(module for column in reversed(columns.values()) for module in column))
    return {
        "modules": modules,
        "steps": list(columns),
        "largest": [[column.get(module) for column in columns.values()] for module in modules],
    }


def _finite_outputs(readings: Sequence[Reading]) -> dict[str, float | None]:
    broken = {entry.module for entry in readings if entry.direction == "forward" and entry.value.nonfinite}
    return {name: None if name in broken else largest for name, largest in _largest_outputs(readings).items()}


def _agreement(low: Seen | Refusal, reference: Seen, dtype: str, scale: float, limit: float) -> str:
    """Return how far the outputs of modules agree with float32's, where the loss may be off by a limit."""
    readings = unscaled(low.readings, scale, reference.readings) if isinstance(low, Seen) else ()
    errors = [entry for entry in module_errors(reference.readings, readings, dtype) if entry.direction == "forward"]
    apart = next((entry for entry in errors if entry.parts), None)
    by_hand = cast_by_hand(reference.readings)
    if apart is None and by_hand is not None:
        return (
            f"what is computed in float32 there agrees, and what the script itself casts to {by_hand.dtype}, from "
            f"{Place.of(by_hand)} on, was not compared"
        )
    if apart is None:
        off = loss_error(low, reference) if isinstance(low, Seen) else math.nan
        explained = min(limit, bound(dtype, len(errors)))
        loss = f"the loss is {percent(off)} from float32's"
        if off > explained:
            return f"outputs of modules agree, and {loss}, where rounding explains {percent(explained)}"
        return f"every module agrees, and {loss}"
    module = f"module {apart.module!r}" if apart.module else "the model"
    if math.isinf(apart.error):
        return f"outputs of {module} are not finite"
    return f"{module} is {percent(apart.error)} from float32's, where rounding explains {percent(apart.bound)}"


def lost_updates(outcome: Outcome) -> list[str]:
    """Return a sentence for each optimizer whose updates of weights in low precision are rounded away."""
    sentences = []
    for meter in outcome.run["meters"]:
        low = [entry for entry in meter["last"]["parameters"] if entry["dtype"] in _LOW and entry["moved"]]
        moved, unchanged = (sum(entry[name] for entry in low) for name in ("moved", "unchanged"))
        if low and unchanged > LOST * moved:
            share, dtype = percent(unchanged / moved), low[0]["dtype"]
            sentences.append(
                f"{share} of the updates of weights in {dtype} were rounded away in step {meter['last']['step']}, by "
                f"{meter['optimizer']}: they are smaller than the spacing of numbers in {dtype}. To store the weights "
                f"in float32 may cure it, and was not tried."
            )
    return sentences


def rounded_weights(low: Outcome, exact: Callable[[], Outcome]) -> dict[str, int]:
    """Return the float32 parameters that a run rounds, each with the first of the sampled steps from which it is so.

    To all numbers of their sample the low dtype fits, and to those of float32 it does not, in the first step either:
    of constants, and of what is loaded in half precision, nothing is known.

    Args:
        low: The run.
        exact: Returns the run in float32 from the first step on.
    """
    fitting = {} if low.dtype == "float32" else _fitting(low, low.dtype)
    since = {name: [*itertools.takewhile(steps.get, reversed(steps))][-1:] for name, steps in fitting.items()}
    wide = _fitting(exact(), low.dtype) if any(since.values()) else {}
    return {name: step for name in wide if not any(wide[name].values()) for step in since.get(name, ())}


def _fitting(outcome: Outcome, dtype: str) -> dict[str, dict[int, bool]]:
    """Return of each parameter, by step, whether a dtype fits to the numbers of its sample."""
    fitting: dict[str, dict[int, bool]] = {}
    for step, entries in sorted(outcome.gradients.items()):
        for entry in entries:
            if entry.weights is not None:
                fitting.setdefault(entry.name, {})[step] = is_rounded(entry.weights, dtype)
    return fitting


def rounding_fault(readings: Sequence[Reading], rounded: Mapping[str, int], dtype: str) -> Fault:
    """Say that a run rounds weights, which `rounded_weights` returns; the place is the module of the first."""
    values = ((at, entry) for at, entry in enumerate(readings) if entry.direction == "forward" and entry.module)
    outputs = {entry.module: at for at, entry in values if not entry.operation}
    position = outputs.get(owner_of(next(iter(rounded)), outputs))
    return Fault("digits", rounding_in_words(rounded, dtype), readings, position)


def rounding_in_words(rounded: Mapping[str, int], dtype: str) -> str:
    """Say that a run rounds weights, which `rounded_weights` returns; no final stop."""
    return (
        f"the weights {listed_names([*rounded])} are stored in float32, and from step {min(rounded.values())} on they "
        f"hold nothing but numbers of {dtype}, which they do not in a float32 run: what is written back to them was "
        f"rounded, and smaller updates are rounded away"
    )


def _of_module(entry: Reading, exact: Reading | None) -> dict[str, Any]:
    names = ("module", "kind", "direction", "call", "dtype", "value", "inputs")
    return {**{name: plain(getattr(entry, name)) for name in names}, "float32": exact and plain(exact.value)}


def _nothing_failed(seen: Outcome) -> str:
    losses = "the losses are finite" if any(loss is not None for loss in seen.losses) else "no loss was seen"
    return (
        f"Nothing failed in {seen.steps} steps in {seen.dtype}: {losses}, {_skips(seen.skipped)}, and the loss "
        f"scale is {seen.last_scale or 1:g}."
    )


@dataclass(frozen=True)
class _Look:
    """A step that was looked at.

    Attributes:
        step: Its number.
        what: Why it; "" where nothing failed.
        low: The run in which it was watched.
        exact: What was read of it in float32.
        diagnosis: Of it.
        agreement: How far modules agree with float32 there.
        parting: How far losses are from float32's, as far as that is known.
    """

    step: int
    what: str
    low: Outcome
    exact: Sequence[Reading]
    diagnosis: Diagnosis
    agreement: str
    parting: Parting

    @property
    def fails(self) -> bool:
        """Whether there is something to say of it."""
        return bool(self.what) or self.diagnosis.kind != "healthy"

    def verdict(self, seen: Outcome) -> str:
        """Return one sentence or two."""
        if self.fails:
            return f"In step {self.step}, {self.diagnosis.why}"
        off = self.parting.off
        harmless = ", which did no harm" if off and not any(map(self.parting.is_wrong, off)) else ""
        dangers = f"some risks{harmless}" if self.diagnosis.risks else "no risks"
        compared = f"was compared with float32: {self.agreement}, and there are {dangers}."
        if self.parting.is_wrong(self.step):
            error = percent(off[self.step])
            loss = f"The loss of step {self.step} of {seen.steps} in {seen.dtype} is {error} from float32's"
            return f"{loss}, and it is not known why: that step {compared}"
        return f"{_nothing_failed(seen)}{self._within()} Step {self.step} {compared}"

    def _within(self) -> str:
        off = self.parting.off
        return f" To step {max(off)} losses are within {percent(max(off.values()))} of float32's." if off else ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        readings = self.low.readings.get(self.step, ())
        exact = by_key(self.exact)
        return {
            "step": self.step if self.fails else None,
            "looked_at": self.step,
            "fault": self.what or ("wrong" if self.fails else None),
            "diagnosis": self.diagnosis.to_json() if self.fails else None,
            "risks": plain(self.diagnosis.risks),
            "modules": [_of_module(entry, exact.get(key_of(entry))) for entry in readings if not entry.operation],
            "map": _map(self.low),
        }


_NOT_LOOKED: Final[dict[str, Any]] = {
    **dict.fromkeys(("step", "looked_at", "fault", "diagnosis", "map")),
    "risks": [],
    "modules": [],
}


def _report(trial: Trial, seen: Outcome, notes: Sequence[str], look: _Look | None = None) -> dict[str, Any]:
    run = seen.to_json()
    mistakes = seen.mistakes if look is None else (*seen.mistakes, *look.low.mistakes)
    return {
        "schema": SCHEMA,
        "script": trial.program.name,
        "arguments": list(trial.program.arguments),
        **{name: seen.run[name] for name in ("framework", "device", "level")},
        "dtype": seen.dtype,
        "seed": trial.seed,
        "steps": seen.steps,
        **{name: run[name] for name in ("losses", "losses_of", "skipped")},
        **(_NOT_LOOKED if look is None else look.to_json()),
        "verdict": _nothing_failed(seen) if look is None else look.verdict(seen),
        "mistakes": list(dict.fromkeys(mistakes)),
        "notes": list(dict.fromkeys(notes)),
        "origin": origin(seen.versions),
    }
