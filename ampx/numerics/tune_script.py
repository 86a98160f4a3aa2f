"""`ampx tune`: which modules of an unedited script stay in float32, found by runs of it that end after some steps."""

from __future__ import annotations

import glob
import itertools
import json
import math
import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from ampx.backend import MODULE, module_patterns, prepare_line
from ampx.errors import InvalidOptionError, TrialError, UnsupportedDtypeError, UnsupportedOpError
from ampx.formats import FORMATS, find_digits, find_format
from ampx.policy import PolicyFile, normalise_dtype
from ampx.run import RunSettings
from ampx.run.command import check_writable
from ampx.run.page import origin
from ampx.run.program import Program

from .batch import FLOAT32, Seen, fitting_scale, scaled
from .causes import find_fault
from .compare import MARGIN, ModuleError, error_map, key_of, module_errors, relative_error
from .cures import low_operation
from .diagnose_script import Parting, decided, losses_off, lost_updates, rates_part
from .forcing import inside, kept_in_float32, rounded_alone
from .journal import Journal, digest_of
from .operations import failing
from .places import cast_by_hand, of_the_step
from .probe import Reading, Replayed, Watching
from .ranking import by_error, first_order
from .template import Imported
from .timing import busy, slow_modules
from .tolerance import (
    LARGEST_TOLERANCE,
    Distance,
    Place,
    Tolerance,
    by_count,
    by_rounding,
    percent,
    place_of,
    rounding,
    with_joined_gradients,
)
from .trial import Outcome, Trial, how_to_name, not_repeatable, run_trial, step_errors, warm_up_of
from .tune_search import NOTHING, Kept, Search, Verdict, minimal, most_runs, searched
from .tuned_policy import Choice, TunedPolicy, in_float32

SCHEMA: Final = "ampx.tune/1"
_SAMPLES: Final = 256
# Steps whose values are compared. What is off in one of them only may have crossed a threshold, such as ReLU's.
_DECIDING: Final = (1, 2)
_CLEARLY: Final = 1.25  # times as long as the fastest
_SIMULATED: Final = (
    "Simulated: numbers are rounded where modules take and return them, and not between the operations inside, which "
    "may overflow where the dtype itself is computed."
)
_EXPORTED: Final = (
    "Names of nodes are as torch.onnx.export(dynamo=False) writes them. With dynamo=True nodes are numbered, and the "
    "modules of each are in its metadata, `pkg.torch.onnx.name_scopes`."
)
_EXPORTED_ELSEWHERE: Final = (
    "Names of nodes are as PyTorch's exporter writes them; exporters of {} have names of their own: compare them with "
    "the graph."
)


def check_options(purpose: str, what_if: str | None, out: Path, force: bool = False) -> str | None:
    """Check options before anything runs; return the dtype to simulate, None for none.

    A policy file that is there may have been edited, so it is written anew only by `force`.

    Raises:
        InvalidOptionError: One cannot be honoured.
    """
    if purpose not in ("training", "inference"):
        raise InvalidOptionError(f"--for {purpose!r} is no choice; accepted: training, inference. Pass one of these.")
    if what_if is None:  # else no file is written
        if out.is_file() and not force:
            raise InvalidOptionError(
                f"-o {str(out)!r} is there already, and is left as it is; accepted: a name that is free, or --force. "
                f"Pass another name by -o, or --force to measure it anew: what you added to it stays."
            )
        if out.is_file():
            PolicyFile.read(out)  # what a person added to it is to stay
        check_writable("-o", out)
        return None
    try:
        return find_format(what_if)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(f"--what-if: {error}") from error


class _ScriptSearch(Search[Outcome]):
    """Runs of a script, each in a process of its own."""

    def __init__(
        self,
        trial: Trial,
        dtype: str,
        for_inference: bool,
        simulated: bool,
        times: bool,
        run: Callable[[Trial], Outcome],
        progress: Callable[[str, int | None], Any],
        journal: Journal,
    ) -> None:
        self.trial, self.dtype, self.simulated = trial, dtype, simulated
        self.run_trial, self.progress, self.journal = run, progress, journal
        self.seconds: list[float] = []  # of the runs so far
        self.imported: Imported | None = None  # by the first
        self.watching = Watching(dtype if dtype != "auto" else "float16", samples=_SAMPLES, times=times)
        settings = replace(trial.settings, dtype=FLOAT32.dtype, watched=True, meter_every=_DECIDING[-1])
        last = trial.steps or 1
        self.watched = tuple(sorted({*_DECIDING, (1 + last) // 2, last}))  # the others are for the map
        self.wide = replace(trial, settings=settings, watched=_DECIDING, watching=replace(self.watching, times=False))
        self.reference = self.run(self._whole())
        self.check_float32(for_inference)
        readings = self.reference.readings.get(1, ())
        # Without names, losses alone decide; the operations tell how many roundings a loss has behind it.
        self.unnamed = not readings
        if self.unnamed:
            readings = () if for_inference or simulated else self._operations(settings)
            self.reference = replace(self.reference, readings={1: readings})
        if not readings:
            raise TrialError(_nothing_watched(trial, self.reference))
        super().__init__(for_inference, readings)
        self.framework, self.device = (str(self.reference.run[name]) for name in ("framework", "device"))
        if not for_inference:
            self.check_by_hand()

    def _whole(self) -> Trial:
        """Return the run in float32 that tells of all steps for the map."""
        return replace(self.wide, watched=self.watched, watching=self.watching)

    def run(self, trial: Trial) -> Outcome:
        """Run the script, and count that."""
        self.runs += 1
        rounds = any(map(find_digits, trial.forced.values()))
        what = self.dtype if trial.forced and not rounds else trial.settings.dtype
        kept = len(trial.settings.deny) or len(trial.forced) - 1
        what += f" rounded as {self.dtype}" if rounds else f" with {kept} in float32" if kept > 0 else ""
        watched = ", watched" if trial.watched else ""
        words, left = self._left()
        self.progress(f"{trial.program.name}: run {self.runs}{words}, {what}{watched} …", left)
        began = time.monotonic()
        outcome = self.run_trial(replace(trial, imported=self.imported))
        self.imported = self.imported or outcome.imported
        self.seconds.append(time.monotonic() - began)
        return outcome

    def _left(self) -> tuple[str, int | None]:
        """Return how many runs follow at most, as long as no more modules turn out to be needed, and their time.

        In words, and how many they are with this one; None before the modules are known.
        """
        if not self.modules:
            return "", None
        needed = next(count for count in range(1, len(self.modules) + 2) if self._most(count) >= self.runs)
        left = self._most(needed) - self.runs
        seconds = left * statistics.median(self.seconds)
        time_left = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        entries = f"{needed} module{'s are' if needed > 1 else ' is'} needed"
        return f" (at most {left} more, {time_left}, if {entries})", 1 + left

    def _most(self, entries: int) -> int:
        return most_runs(entries, len(self.modules))

    def check_float32(self, for_inference: bool) -> None:
        """Raise where float32 itself fails: no choice of modules cures that.

        Raises:
            TrialError: A loss is not finite, or in training a gradient.
        """
        skipped = [] if for_inference else self.reference.skipped
        faults = {step: "its gradients are not finite" for step in skipped}
        losses = [(step, loss) for step, loss in enumerate(self.reference.losses, 1) if loss is not None]
        # Beyond that many times the first loss, the dtype could not hold both, in whatever unit.
        largest = FORMATS[self.watching.dtype].largest * max((abs(loss) for _, loss in losses[:1]), default=0.0)
        for step, loss in losses:
            if not abs(loss) <= (largest or math.inf):
                faults[step] = f"its loss is {loss:g}"
        if faults:
            first = min(faults)
            self._fails_in_float32(f"{faults[first]} in step {first}")

    def check_by_hand(self) -> None:
        """Raise where the script itself casts to what cannot hold it: no choice of modules reaches that.

        Raises:
            TrialError: A value is not finite, or updates are lost, in float32 as well.
        """
        lost = [*lost_updates(self.reference), *self.reference.mistakes]  # of weights, and of what else it stores so
        if lost:
            self._fails_in_float32(lost[0].partition(". ")[0])
        if cast_by_hand(self.reference.readings[1]) is None or self.simulated:
            return
        wide = self.seen(None)
        fault = find_fault(wide, wide, FLOAT32.dtype, 1.0)
        if fault is not None and fault.by_hand:
            self._fails_in_float32(fault.why)

    def _fails_in_float32(self, why: str) -> NoReturn:
        raise TrialError(
            f"{self.trial.program.name} fails in float32 itself: {why}, which no choice of modules cures; accepted: a "
            f"script that trains in float32. `ampx diagnose` says where it fails."
        )

    def look(self, kept: Kept | None, step: int) -> Seen:
        watching = replace(self.watching, operations=True, times=False)
        trial = self.wide if kept is None else self.low(kept, watched=(step,))
        run = self.run(replace(trial, watched=(step,), steps=step, watching=watching))
        loss = run.losses[-1] if run.losses else math.nan
        readings = of_the_step(run.readings.get(step, ()))
        largest = max((abs(loss) for loss in run.losses if loss is not None and math.isfinite(loss)), default=0.0)
        return Seen(Replayed(0.0 if loss is None else loss, {}, {}), readings, step in run.skipped, largest)

    def fails_rounded(self, module: str) -> bool:
        forced = rounded_alone(module, self.modules, FORMATS[self.dtype].bits)
        return bool(self.failure(self.run(replace(self.wide, forced=forced, may_raise=True))))

    def _operations(self, settings: RunSettings) -> tuple[Reading, ...]:
        """Return what the operations of the first step compute in float32."""
        if not self.reference.watches:
            return ()
        watching = Watching(self.watching.dtype, operations=True)
        trial = replace(self.trial, settings=settings, steps=1, watched=(1,), watching=watching)
        return self.run(trial).readings.get(1, ())

    def begin(self, dtype: str, tolerance: float | None) -> None:
        """Run in the dtype that was chosen; with it loss scale and tolerance are fixed."""
        self.dtype = dtype
        self.scale = self._fitting() if scaled(dtype) else 1.0
        names = not self.unnamed and dtype != FLOAT32.dtype
        self.rounded = [self._rounded(seed) for seed in (0, 1)] if names else []
        self.asked = tolerance
        self.repeated: list[Distance] = []  # of runs in float32 from one another, where they differ
        self.spared: list[Distance] = []  # of a run that rounds all but the likeliest modules
        self.tolerance = self._explained().at(tolerance)
        deciding = (self.tolerance.smallest_scale(dtype, self.reference.readings.get(step, ())) for step in _DECIDING)
        self.smallest_scale = min(self.scale, max(deciding))
        self.first = self.settled(NOTHING)
        self.errors = {step: step_errors(self.reference, self.first, step, dtype) for step in self.watched}
        self.order = self._order()
        if dtype != FLOAT32.dtype and self.failure(self.first):
            self._repeat_float32()
            self._sample_noise_again()  # before anything is blamed
            self.tolerance = self._explained().at(tolerance)
        self.recalled = self._recalled(tolerance)
        self.failures[NOTHING] = self.failure(self.first)
        self._rank_errors()

    def _rank_errors(self) -> None:
        """Note how far the values of each module are off at most."""
        self.worst: dict[str, dict[int, float]] = {}  # by module and step, of outputs and their gradients
        self.broken_outputs: set[str] = set()
        for step, errors in self.errors.items():
            for entry in errors:
                own = self.worst.setdefault(entry.module, {})
                own[step] = max(entry.error, own.get(step, 0.0))
                if entry.direction == "forward" and math.isinf(entry.error):
                    self.broken_outputs.add(entry.module)

    def _recalled(self, tolerance: float | None) -> dict[Kept, Verdict]:
        """Return the verdicts of a search for the same that was interrupted."""
        program, trial = self.trial.program, self.trial
        asked = {name: getattr(trial, name) for name in ("seed", "steps", "framework")}
        script = {"name": program.name, "arguments": program.arguments, "digest": digest_of(Path(program.name))}
        verdicts = self.journal.begin(
            {
                **asked,
                **script,
                "dtype": self.dtype,
                "simulated": self.simulated,
                "for_inference": self.for_inference,
                "tolerance": tolerance,
                "device": self.device,
                "versions": dict(self.reference.versions),
                "modules": self.modules,
            }
        )
        if verdicts:
            self.progress(f"{program.name}: {len(verdicts)} runs of a search that was interrupted are known …", None)
        return {Kept(*map(frozenset, json.loads(kept))): Verdict(**verdict) for kept, verdict in verdicts.items()}

    def note(self, kept: Kept, verdict: Verdict) -> None:
        self.journal.note(json.dumps([sorted(kept.modules), sorted(kept.operations)]), asdict(verdict))

    def _fitting(self) -> float:
        """Return the loss scale whose gradients fit in all watched steps."""
        readings = [entry for entries in self.reference.readings.values() for entry in entries]
        return fitting_scale(self.dtype, Seen(Replayed(0.0, {}, {}), tuple(readings)))

    def _explained(self) -> Tolerance:
        """Return what rounding explains, measured where modules have names."""
        if self.rounded and not any(run.raised for run in self.rounded):
            apart = [self.distance(second, first) for first, second in itertools.pairwise(self.rounded)]
            return by_rounding(self.dtype, *apart, *self.spared, *self.repeated, moved=self._moved())
        return by_count(self.dtype, len(self.reference.readings[1]), *self.repeated)

    def _moved(self) -> float:
        """Return how far the losses of float32 are from the first of their optimizer, relative to their norm."""
        if self.for_inference:
            return 0.0
        curves = [[loss for loss in curve if loss is not None] for curve in self.reference.curves()]
        first = [curve[0] for curve in curves for _ in curve]
        return relative_error(np.array(first), np.array([*itertools.chain(*curves)]))

    def _rounded(self, seed: int, spared: Sequence[str] = ()) -> Outcome:
        """Run in float32 with all modules rounded but some, which those around them hand on to them as it is."""
        around = [name for name in self.modules if any(inside(other, name) for other in spared)]
        wide = {**dict.fromkeys(map(glob.escape, around), "float32"), **kept_in_float32(spared, self.modules)}
        forced = {**rounding(self.dtype, seed), **wide}
        return self.run(replace(self.wide, forced=forced, may_raise=True))

    def _sample_noise_again(self) -> None:
        """Sample noise once more: it may be a jump, which one pair of runs misses.

        If rounding breaks the run, all such runs are broken alike, and tell nothing of the noise of one that is not.
        Then the module likeliest to be at fault is spared, and the one before it, which may have lost what that misses;
        what is left is noise if that mends the run.
        """
        if not self.rounded or any(run.raised for run in self.rounded):
            return
        broken = self.distance(self.rounded[0])
        if not self.tolerance.exceeded(broken):
            self.rounded.append(self._rounded(len(self.rounded)))
            return
        likeliest = self.modules.index(self.order[0])
        run = self._rounded(0, self.modules[max(0, likeliest - 1) : likeliest + 1])
        if not run.raised:
            noise = self.distance(run)
            self.spared += [noise] * (MARGIN * noise.loss < min(LARGEST_TOLERANCE, broken.loss))

    def _repeat_float32(self) -> None:
        """Run in float32 again: what differs from run to run is noise, for which precision is not to be blamed.

        Raises:
            TrialError: Losses differ by more than rounding explains.
        """
        again = self.run(self._whole())  # JAX may round otherwise in steps that it compiles without watching
        if all(loss is None for loss in again.losses):
            return
        own = self.distance(again)
        if own.loss > self.tolerance.loss:
            raise TrialError(not_repeatable(self.trial.program))
        if own.loss or own.gradients:
            self.repeated.append(own)

    def _order(self) -> list[str]:
        """Return modules, the likeliest to be needed in float32 first: what may have raised, where something did."""
        reference, low = self.reference.readings[1], self.first.unscaled_readings(1, self.reference.readings[1])
        loss = next(iter(self.reference.losses), None)
        effects = {} if loss is None else first_order(reference, low, loss)
        raised = _may_have_raised(reference, low) if self.first.raised else []
        return list(dict.fromkeys([*raised, *by_error(self.modules, self.errors[1], effects)]))

    def low(self, kept: Kept = NOTHING, **options: Any) -> Trial:
        """Return the run in the dtype, with modules and operations in float32."""
        forced = kept_in_float32(kept.modules, self.modules)
        settings = replace(self.trial.settings, watched=bool(options.get("watched")), loss_scale=self.scale)
        options["may_raise"] = True
        if self.simulated:
            settings = replace(settings, dtype=FLOAT32.dtype)
            return replace(self.trial, settings=settings, forced={"*": self.dtype, **forced}, **options)
        denied = (f"{MODULE}{pattern}" for pattern in forced if pattern)
        settings = replace(settings, dtype=self.dtype, deny=(*settings.deny, *denied, *sorted(kept.operations)))
        return replace(self.trial, settings=settings, **options)

    def compute(self, kept: Kept) -> Outcome:
        if kept == NOTHING:
            return self._noted(kept, self.run(self.low(watched=self.watched, watching=self.watching)))
        only = (glob.escape(self.output),) if self.for_inference and self.output else ()
        watching = replace(self.watching, modules=only, times=False)
        try:
            return self._noted(kept, self.run(self.low(kept, watched=_DECIDING, watching=watching)))
        except TrialError as error:
            if not kept.operations:
                raise
            raise UnsupportedOpError(str(error)) from error

    def _noted(self, kept: Kept, run: Outcome) -> Outcome:
        """Note in which step a run fails: the first that is skipped, raises, or whose loss is not finite, or wrong.

        Where only other values are off, that is the first step: later the weights are others.
        """
        broken = [step for step, loss in enumerate(run.losses, 1) if not _is_finite(loss)]
        raised = [] if run.raised is None else [len(run.losses) + 1]
        off = losses_off(self.reference, run)
        wrong = filter(Parting(off, dict.fromkeys(off, self.tolerance.loss)).is_wrong, off)
        self.step_of[kept] = min([*run.skipped, *broken, *raised, *wrong], default=1)
        return run

    def overflows(self, run: Outcome) -> bool:
        finite = all(map(_is_finite, run.losses)) and not any(
            entry.value.nonfinite for entry in run.readings.get(1, ()) if entry.direction == "forward"
        )
        return bool(run.skipped) and finite and run.raised is None and scaled(self.dtype)

    def failure(self, run: Outcome) -> str:
        if run.raised is not None:
            return f"the script raises {run.raised[0]}"
        skipped = [] if self.for_inference else run.skipped
        if skipped:
            return f"{len(skipped)} of {run.steps} steps {'is' if len(skipped) == 1 else 'are'} skipped"
        return self.tolerance.exceeded(self.distance(run))

    def distance(self, run: Outcome, reference: Outcome | None = None) -> Distance:
        """Return how far a run is from another, by default float32's.

        Losses count, and of the first steps gradients and values of modules, each in the step where it is closest if it
        is finite in all: a loss may agree by chance, or because it does not move in so few steps. For inference only
        the output counts.
        """
        reference = reference or self.reference
        gradients: list[float] = []
        values: dict[Place, ModuleError] = {}
        for step in _DECIDING:
            wide = reference.unscaled_readings(step)
            exact, low = map(with_joined_gradients, (wide, run.unscaled_readings(step, wide)))
            gradients += _gradient_error(low, exact)
            for error in module_errors(exact, low, self.dtype):
                place = place_of(error)
                values[place] = min(error, values.get(place, error), key=lambda entry: _closeness(entry.error))
        errors = list(values.values())
        if self.for_inference:
            outputs = [entry for entry in errors if (entry.module, entry.direction) == (self.output, "forward")]
            return Distance(0.0 if outputs else math.inf, values=outputs)
        return Distance(self.loss_error(run, reference), min(gradients, key=_closeness, default=0.0), errors)

    @property
    def beginning(self) -> Distance | None:
        compared = self.step_of.get(NOTHING, 1) <= _DECIDING[-1]  # the step that fails, as far as modules return
        return self.distance(self.first) if compared and not self.first.raised else None

    def failing_operations(self, modules: frozenset[str]) -> tuple[str, ...]:
        # That takes two runs: only where a module's values are not finite.
        broken = any(math.isinf(error) for name in modules for error in self.worst.get(name, {}).values())
        return failing(self.failing(NOTHING).readings) if broken and not self.simulated else ()

    def smallest_operations(self) -> frozenset[str] | None:
        if self.simulated:
            return None
        names: dict[str, None] = {}
        for name in self._likely_operations():
            names[name] = None
            if self.passes(Kept(operations=frozenset({name})), 1):
                return frozenset({name})
        return minimal([*names], lambda names: bool(names) and self.passes(Kept(operations=names), 1))

    def _likely_operations(self) -> Iterator[str]:
        """Walk over the operations that may be at fault, at last that which loses digits: it takes a run in float32."""
        readings = self.failing(NOTHING).readings
        yield from failing(readings)
        yield from _before_failing(readings)
        fault = self.fault(NOTHING)
        low = None if fault is None or fault.position is None else low_operation(fault.readings, fault.position)
        if fault is not None and low is not None:
            yield fault.readings[low].operation

    def policy_fields(self, kept: Kept) -> dict[str, Any]:
        patterns = filter(None, kept_in_float32(kept.modules, self.modules))
        denied = [Choice(f"{MODULE}{pattern}", self._reason(pattern, kept.modules)) for pattern in patterns]
        denied += [Choice(name, self.reason_of_operation(name)) for name in sorted(kept.operations)]
        reasons = {
            "dtype": f"{self._agree()}{', simulated' if self.simulated else ''}",
            "loss_scale": f"gradients of these steps fit with {self.scale:g}"
            if scaled(self.dtype)
            else f"{self.dtype} has the exponents of float32",
        }
        return {"deny": tuple(denied), "reasons": reasons}

    def _agree(self) -> str:
        if self.for_inference:
            return f"the output agrees with float32's within {self.limit(percent(self._of_output()))}"
        losses, loss = f"losses of {self.trial.steps} steps", percent(self.tolerance.loss)
        if self.unnamed:
            return f"{losses} agree with float32's within {self.limit(loss)}"
        numbers = f"{loss} and {percent(self.tolerance.gradients)}"
        return f"{losses} and the first gradients agree with float32's within {self.limit(numbers)}"

    def _of_output(self) -> float:
        """Return the tolerance of the output, for inference."""
        return min(map(self.tolerance.of, self.distance(self.reference).values), default=self.tolerance.loss)

    def _reason(self, pattern: str, kept: Iterable[str]) -> str:
        """Return why a module is kept."""
        name = next((name for name in kept if glob.escape(name) == pattern), None)
        return "all modules inside it" if name is None else self.reason(name, self._measured(name))

    def _measured(self, name: str) -> str:
        """Return a module's error in the first step that was watched, and in a later one where it is larger."""
        errors = self.worst.get(name)
        if not errors:
            return f"not reached in {self.dtype}"
        broken = next((step for step, error in errors.items() if math.isinf(error)), None)
        if broken is not None:
            value = "output" if name in self.broken_outputs else "gradient"
            return f"its {value} is not finite in {self.dtype} in step {broken}"
        first = errors.get(1, 0.0)
        last = max(errors, key=lambda step: errors[step], default=1)
        later = f", {errors[last]:.2g} in step {last}" if last > 1 and errors[last] > 2 * first else ""
        return f"relative error of {first:.2g} in {self.dtype} in step 1{later}"

    def hopeless(self, whole: bool) -> dict[str, Any]:
        what, tolerance = (
            ("the output differs", self._of_output()) if self.for_inference else ("losses differ", self.tolerance.loss)
        )
        reason = f"in {self.dtype} {what} from float32's by more than {self.limit(percent(tolerance))}"
        trains_alike = not (self.for_inference or self.first.raised or self.first.skipped)
        if trains_alike and self.loss_error(self.first, self.reference) <= tolerance:
            reason = f"in {self.dtype} {self.failure(self.first)}"
        if self.unnamed:
            why = _nothing_watched(self.trial, self.reference)
            raise TrialError(f"{reason}, and no list of operations cures that: {why}")
        which = " unless the whole model is in float32" if whole else ", whichever modules were tried in float32"
        fault = None if self.simulated else self.fault(NOTHING)
        first = "" if fault is None else f"; {fault.why}"
        return in_float32(f"{reason}{which}{first}", agrees=False)

    def slow(self, kept: Kept, repeats: int) -> dict[str, tuple[float, float]]:
        # In the first step much is made that later steps find ready.
        low, wide = (
            [readings for step, readings in outcome.readings.items() if step > 1]
            for outcome in (self.first, self.reference)
        )
        return slow_modules(low, wide)

    def times(self, choices: Mapping[str, Kept | None], repeats: int) -> dict[str, list[float]]:
        block = max(1, ((self.trial.steps or 1) - self.trial.warm_up) // 5)
        wide = replace(self.trial, settings=replace(self.trial.settings, dtype=FLOAT32.dtype), block=block)
        trials = {name: wide if kept is None else self.low(kept, block=block) for name, kept in choices.items()}
        seconds: dict[str, list[float]] = {name: [] for name in trials}
        for _ in range(repeats):
            for name, trial in trials.items():
                seconds[name].append(self.run(trial).seconds_a_step or math.nan)
            if _is_clear(seconds):
                break
        return seconds

    def loss_error(self, outcome: Outcome, reference: Outcome) -> float:
        """Return how far losses are from another run's, relative to their norm."""
        pairs = [
            (low, wide)
            for low, wide in zip(outcome.losses, reference.losses, strict=False)
            if low is not None and wide is not None
        ]
        if not pairs:
            raise TrialError(
                f"{self.trial.program.name} has no losses that can be compared: this backend does not report them; "
                f"accepted: one that does. Use ampx.tune(step, model) in code."
            )
        lows, wides = np.array(pairs).T
        return relative_error(lows, wides)


def _is_finite(loss: float | None) -> bool:
    """Return whether a loss is finite, as far as is known."""
    return loss is None or math.isfinite(loss)


def _may_have_raised(reference: Sequence[Reading], low: Iterable[Reading]) -> list[str]:
    """Return the first module that returned nothing, and the innermost around it and what was computed before."""
    reached = {key_of(entry) for entry in low}
    position = next((at for at, entry in enumerate(reference) if key_of(entry) not in reached), None)
    if position is None or reference[position].direction == "backward":
        return []
    both = [entry.module for entry in reference[max(0, position - 1) : position + 1]]
    names = {entry.module for entry in reference if all(inside(name, entry.module) for name in both)}
    around = sorted((name for name in names if name.rpartition(":")[2]), key=len)
    return [reference[position].module, *around[-1:]]


def _nothing_watched(trial: Trial, outcome: Outcome) -> str:
    """Say why a first step has no readings."""
    script = trial.program.name
    if not outcome.watches:
        return (
            f"no module of {script} could be watched in its first step; accepted: a framework whose backend watches. "
            f"`ampx backends` shows which does."
        )
    return (
        f"no named module computed anything in the first step of {script}, and tune chooses among modules by their "
        f"names; accepted: a model of named modules, called in what is differentiated. {how_to_name(outcome)}. "
        f"`ampx compare` and `ampx diagnose` need no names. {' '.join(outcome.run['notes'])}".rstrip()
    )


def _before_failing(readings: Sequence[Reading]) -> list[str]:
    """Return the operations that make zeros between a module and the first operation that fails, the last in front.

    They may have flushed what that needs, such as a softmax in front of a logarithm: not where it receives no zero.
    """
    first = next(iter(failing(readings)), None)
    names: list[str] = []
    for entry in readings:
        if first is not None and entry.operation == first:
            return names[::-1] if entry.inputs.zeros else []
        if not entry.operation:
            names = []
        elif entry.value.zeros > entry.inputs.zeros:
            names.append(entry.operation.lstrip("_"))  # PyTorch's own name of what a list knows without it
    return []


def _closeness(error: float) -> float:
    """Return the key by which `min` finds the step that decides: the closest, or one that is not finite.

    A threshold that was crossed by chance makes no infinity.
    """
    return -math.inf if math.isinf(error) else error


def _gradient_error(low: Iterable[Reading], exact: Iterable[Reading]) -> list[float]:
    """Return how far sampled gradients of the outputs of modules are off, all together; nothing of none."""
    samples, references = (
        {entry.module: entry.sample for entry in readings if entry.direction == "backward" and entry.sample is not None}
        for readings in (low, exact)
    )
    common = [name for name in references if name in samples and samples[name].shape == references[name].shape]
    joined = [np.concatenate([gradients[name] for name in common]) for gradients in (samples, references) if common]
    return [relative_error(*joined)] if joined else []


def tune_script(
    program: Program,
    settings: RunSettings,
    *,
    framework: str | None = None,
    steps: int = 20,
    tolerance: float | None = None,
    for_inference: bool = False,
    what_if: str | None = None,
    repeats: int = 3,
    seed: int = 0,
    run: Callable[[Trial], Outcome] = run_trial,
    progress: Callable[[str, int | None], Any] = lambda text, left: None,
    journal: Path | None = None,
    checkpoint: Path | None = None,
    out: str = "ampx.toml",
) -> tuple[TunedPolicy, dict[str, Any]]:
    """Return the policy, and the report, whose layout docs/reference/json.md tells.

    Args:
        program: The script.
        settings: As for `ampx run`.
        framework: The only framework to automate.
        steps: End every run after so many steps.
        tolerance: How far losses and the first gradients may be from float32's, relative to their norm; by default
            what rounding explains, measured by a run in float32: see `ampx.tune`.
        for_inference: Compare the output of the model in the first step, and nothing else.
        what_if: A dtype to simulate, whatever the device computes.
        repeats: Rounds of timed runs; 0 measures no speed.
        seed: What random numbers start from.
        run: Runs a trial.
        progress: Is called with what is done now, and how many runs are left, this one included; None: not known.
        journal: A file in which runs are noted until there is an answer: a search that was interrupted goes on.
        checkpoint: What every run starts from, where `run` sees to that: a search from another does not go on.
        out: What the policy file will be called.

    Raises:
        TrialError: A run in float32 failed, or the backend cannot watch modules.
    """
    warm_up = warm_up_of(steps, 5)
    trial = Trial(program, settings, framework, seed, 1 if for_inference else steps, warm_up, shares_compiled=True)
    timed = repeats > 0 and what_if is None and not for_inference
    disturbance = busy() if timed else []
    dtype, why = what_if or settings.dtype, "float32 was asked for"
    if what_if is None and dtype != "auto":
        dtype = normalise_dtype(dtype)
    notes = Journal(journal, digest_of(checkpoint))
    search = _ScriptSearch(trial, dtype, for_inference, what_if is not None, timed, run, progress, notes)
    if dtype == "auto":
        dtype, why = _chosen(search.run(replace(trial, steps=1)))
    search.begin(dtype, tolerance)
    if dtype == FLOAT32.dtype:
        why = f"mixed precision is off on this device: {why}; --what-if float16 simulates it"
        policy = search.policy(**in_float32(why))
        return policy, _report(search, policy, out)
    policy = searched(search, repeats if timed else 0)
    search.journal.end()
    report = _report(search, policy, out)
    report["notes"] += [*(disturbance if policy.agrees else []), *_remarks(search, policy, report["exclusions"])]
    return policy, report


def _chosen(probe: Outcome) -> tuple[str, str]:
    """Return what `auto` chooses, and why; what the device has in hardware where that is float32."""
    # Whether it pays is what tune measures.
    dtype = probe.native[0] if probe.dtype == FLOAT32.dtype and probe.native else probe.dtype
    return dtype, str(probe.run["reason"])


def _remarks(search: _ScriptSearch, policy: TunedPolicy, exclusions: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what is to be known beside the policy."""
    notes = []
    rates = rates_part(search.reference, search.first)
    if rates is not None:  # what is kept for that is not at fault itself
        notes.append(f"From step {rates[0]} of {search.trial.program.name} on {decided(rates, search.dtype)}.")
    if exclusions:
        notes.append(_for_tensorrt(policy, exclusions))
        notes.append(_EXPORTED if policy.framework == "torch" else _EXPORTED_ELSEWHERE.format(policy.framework))
    notes += [
        f"Losses of {search.trial.program.name} differ from run to run in float32, by {percent(noise.loss)}, and its "
        f"first gradients by {percent(noise.gradients)}: eight times that is within the tolerance."
        for noise in search.repeated
    ]
    if search.unnamed:
        notes.append(
            f"No part of {search.trial.program.name} has a name: losses alone were compared, and no part was tried in "
            f"float32 by itself. {how_to_name(search.reference)}."
        )
    return notes


def _is_clear(seconds: Mapping[str, Sequence[float]]) -> bool:
    """Return whether more rounds would decide nothing: in two and more, one is the fastest by far each time."""
    times = np.array(list(seconds.values()))
    if times.shape[1] < 2:
        return False
    order = np.sort(times, axis=0)
    return len(set(times.argmin(axis=0))) == 1 and bool((order[1] > _CLEARLY * order[0]).all())


def exclusions(policy: TunedPolicy) -> tuple[dict[str, str], ...]:
    """Return the modules that stay in float32 as names of their nodes in an exported ONNX graph.

    PyTorch's exporter by traces calls nodes `/outer/inner/Operation`. A converter of ONNX models takes a regular
    expression that matches from the start of the name (`nodes_to_exclude`), an engine builder of TensorRT 10 and before
    names with wildcards (`--layerPrecisions`).
    """
    patterns = module_patterns(choice.entry for choice in policy.deny)
    names = [_unescaped(name) for name in patterns if name != "*" and not name.endswith(".*")]
    result = []
    for name in names:
        called = [outer for outer in policy.modules if outer and inside(name, outer)]
        path = "/".join(map(_segment, [*sorted(called, key=len), name]))
        result.append({"module": name, "regex": f"/{re.escape(path)}/.*", "wildcard": f"/{path}/*"})
    return tuple(result)


def _for_tensorrt(policy: TunedPolicy, names: Sequence[Mapping[str, str]]) -> str:
    """Return how a runtime that takes precision from the graph keeps parts in float32."""
    deny = [choice.entry for choice in policy.deny if choice.entry.startswith(MODULE)]
    nodes = " ".join(shlex.quote(entry["regex"]) for entry in names)
    low = {"float16": "fp16", "bfloat16": "bf16"}.get(policy.dtype)
    by_tool = (
        f", or what `python -m modelopt.onnx.autocast --onnx_path model.onnx --output_path mixed.onnx "
        f"--low_precision_type {low} --nodes_to_exclude {nodes}` makes of the graph in float32"
    )
    return (
        f"TensorRT 11 and later have no layer precisions: the graph itself says what is computed in which dtype. Hand "
        f"them the export of `ampx.convert(model, {policy.dtype!r}, batches=batches, deny={deny})`"
        f"{by_tool if low else ''}."
    )


def _segment(name: str) -> str:
    """Return what the exporter calls a module inside another: its last name, with the numbers behind it."""
    parts = name.split(".")
    begin = max((place for place, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[begin:])


def _unescaped(pattern: str) -> str:
    """Return the name that `glob.escape` made a pattern of."""
    return re.sub(r"\[([*?[])\]", r"\1", pattern)


def _counted(policy: TunedPolicy) -> str:
    modules = len(module_patterns(choice.entry for choice in policy.deny))
    operations = len(policy.deny) - modules
    shown = f"{modules} of {len(policy.modules)} modules" if policy.modules else "nothing"
    if not operations:
        return shown
    counted = f"{operations} operation{'s' if operations > 1 else ''}"
    return f"{shown} and {counted}" if policy.modules else counted


def _report(search: _ScriptSearch, policy: TunedPolicy, out: str) -> dict[str, Any]:
    trial, file = search.trial, policy.file
    prepare = prepare_line((*file.allow, *file.deny), search.reference.prepare_finds_modules)
    if policy.dtype == FLOAT32.dtype:
        verdict = f"Stay in float32: {policy.reasons['dtype']}."
        if not policy.enabled:
            verdict += " Nothing is cast or scaled, so the policy switches ampx off (enabled = false); true would check"
            verdict += " the gradients of each step, and keep NaN out of the weights."
    else:
        verdict = f"{policy.dtype}, with {_counted(policy)} in float32: {policy.reasons['dtype']}."
    runs = {FLOAT32.dtype: search.reference.to_json(), search.dtype: search.first.to_json()}
    return {
        "schema": SCHEMA,
        "script": trial.program.name,
        "arguments": list(trial.program.arguments),
        "seed": trial.seed,
        "steps": trial.steps,
        "runs": search.runs,
        "policy": policy.to_json(),
        "file": file.text(),
        "lines": [] if search.simulated else [f"amp = ampx.init(policy={out!r})", *prepare],
        "exclusions": list(exclusions(policy)) if search.for_inference else [],
        **{name: {dtype: run[name] for dtype, run in runs.items()} for name in ("losses", "losses_of")},
        "map": error_map(search.errors),
        "verdict": verdict,
        "notes": [*search.reference.notes, *([_SIMULATED] if search.simulated else [])],
        "origin": origin(search.reference.versions),
    }
