"""`ampx tune`: which modules of an unedited script stay in float32, found by runs of it that end after some steps."""

from __future__ import annotations

import glob
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ampx.backend import MODULE, module_patterns
from ampx.errors import InvalidOptionError, TrialError, UnsupportedDtypeError
from ampx.formats import find_format
from ampx.policy import normalise_dtype
from ampx.run import RunSettings
from ampx.run.command import check_writable
from ampx.run.page import origin
from ampx.run.program import Program

from .batch import FLOAT32, Seen, fitting_scale, scaled
from .compare import error_map, module_errors, relative_error
from .operations import failing
from .probe import Reading, Replayed, Watching
from .timing import busy
from .trial import Outcome, Trial, how_to_name, not_repeatable, run_trial, step_errors, warm_up_of
from .tune import (
    NOTHING,
    Choice,
    Kept,
    Search,
    TunedPolicy,
    by_error,
    explained,
    in_float32,
    inside,
    kept_in_float32,
    minimal,
    searched,
    slow_modules,
)

SCHEMA: Final = "ampx.tune/1"
_SAMPLES: Final = 256
# No rounding explains a gradient that is off by more: its module computes something else. Small gradients have little
# weight in the error of all together, and may be off by some percent where rounding moves a threshold such as ReLU's.
_GROSS: Final = 0.25
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

    A policy file that is there may have been edited, so it is replaced only by `force`.

    Raises:
        InvalidOptionError: One cannot be honoured.
    """
    if purpose not in ("training", "inference"):
        raise InvalidOptionError(f"--for {purpose!r} is no choice; accepted: training, inference. Pass one of these.")
    if what_if is None:  # else no file is written
        if out.is_file() and not force:
            raise InvalidOptionError(
                f"-o {str(out)!r} is there already, and is left as it is; accepted: a name that is free, or --force. "
                f"Pass another name by -o, or --force to replace the file."
            )
        check_writable("-o", out)
        return None
    try:
        return find_format(what_if)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(f"--what-if: {error}") from error


class _ScriptSearch(Search):
    """Runs of a script, each in a process of its own."""

    def __init__(
        self,
        trial: Trial,
        dtype: str,
        for_inference: bool,
        simulated: bool,
        times: bool,
        run: Callable[[Trial], Outcome],
        progress: Callable[[str], Any],
    ) -> None:
        self.trial, self.dtype, self.simulated, self.scale = trial, dtype, simulated, 1.0
        self.run_trial, self.progress = run, progress
        self.watching = Watching(dtype if dtype != "auto" else "float16", samples=_SAMPLES, times=times)
        settings = replace(trial.settings, dtype=FLOAT32.dtype, watched=True)
        last = trial.steps or 1
        self.watched = tuple(sorted({1, (1 + last) // 2, last}))  # for the map; the first step decides
        self.reference = self.run(replace(trial, settings=settings, watched=self.watched, watching=self.watching))
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

    def run(self, trial: Trial) -> Outcome:
        """Run the script, and count that."""
        self.runs += 1
        what = self.dtype if trial.forced else trial.settings.dtype
        kept = len(trial.settings.deny) or len(trial.forced) - 1
        what += f" with {kept} in float32" if kept > 0 else ""
        self.progress(f"{trial.program.name}: run {self.runs}, {what}{', watched' if trial.watched else ''} …")
        return self.run_trial(trial)

    def _operations(self, settings: RunSettings) -> tuple[Reading, ...]:
        """Return what the operations of the first step compute in float32."""
        if not self.reference.watches:
            return ()
        watching = Watching(self.watching.dtype, operations=True)
        trial = replace(self.trial, settings=settings, steps=1, watched=(1,), watching=watching)
        return self.run(trial).readings.get(1, ())

    def begin(self, dtype: str, tolerance: float | None) -> None:
        """Run in the dtype that was chosen; with it loss scale and tolerance are fixed."""
        readings = self.reference.readings[1]
        self.dtype = dtype
        if scaled(dtype):
            self.scale = fitting_scale(dtype, Seen(Replayed(0.0, {}, {}), readings))
        self.tolerance = explained(dtype, len(readings)) if tolerance is None else tolerance
        self.first = self.run(self.low(watched=self.watched, watching=self.watching))
        self.errors = {step: step_errors(self.reference, self.first, step, dtype) for step in self.watched}
        self.order = by_error(self.modules, self.errors[1])
        self.worst: dict[str, dict[int, float]] = {}  # by module and step, of outputs and their gradients
        for step, errors in self.errors.items():
            for entry in errors:
                own = self.worst.setdefault(entry.module, {})
                own[step] = max(entry.error, own.get(step, 0.0))

    def low(self, kept: Kept = NOTHING, **options: Any) -> Trial:
        """Return the run in the dtype, with modules and operations in float32."""
        forced = kept_in_float32(kept.modules, self.modules)
        settings = replace(self.trial.settings, watched=bool(options.get("watched")), loss_scale=self.scale)
        if self.simulated:
            settings = replace(settings, dtype=FLOAT32.dtype)
            return replace(self.trial, settings=settings, forced={"*": self.dtype, **forced}, **options)
        denied = (f"{MODULE}{pattern}" for pattern in forced if pattern)
        settings = replace(settings, dtype=self.dtype, deny=(*settings.deny, *denied, *sorted(kept.operations)))
        return replace(self.trial, settings=settings, **options)

    def passes(self, kept: Kept) -> bool:
        if kept == NOTHING:
            return self.agrees(self.first)
        only = (glob.escape(self.output),) if self.for_inference and self.output else ()
        watching = replace(self.watching, modules=only, times=False)
        try:
            outcome = self.run(self.low(kept, watched=(1,), watching=watching))
        except TrialError:  # an operation that no list may hold
            if kept.modules:
                raise
            return False
        return self.agrees(outcome)

    def _failing(self) -> tuple[str, ...]:
        watching = Watching(self.dtype, operations=True)
        return failing(self.run(self.low(watched=(1,), watching=watching)).readings.get(1, ()))

    def failing_operations(self, modules: frozenset[str]) -> tuple[str, ...]:
        # That takes two runs: only where a module's values are not finite.
        broken = any(math.isinf(error) for name in modules for error in self.worst.get(name, {}).values())
        return self._failing() if broken and not self.simulated else ()

    def smallest_operations(self) -> frozenset[str] | None:
        if self.simulated:
            return None
        names = self._failing()
        alone = next((name for name in names if self.passes(Kept(operations=frozenset({name})))), None)
        if alone is not None:
            return frozenset({alone})
        return minimal(names, lambda names: bool(names) and self.passes(Kept(operations=names)))

    def found(self, kept: Kept) -> dict[str, Any]:
        patterns = filter(None, kept_in_float32(kept.modules, self.modules))
        denied = [Choice(f"{MODULE}{pattern}", self._reason(pattern, kept.modules)) for pattern in patterns]
        denied += [Choice(name, f"not finite in {self.dtype}, outside of modules") for name in sorted(kept.operations)]
        what = f"losses of {self.trial.steps} steps {'agree' if self.unnamed else 'and the first gradients agree'}"
        what = "the output agrees" if self.for_inference else what
        reasons = {
            "dtype": f"{what} with float32's within {self.tolerance:.2g}{', simulated' if self.simulated else ''}",
            "loss_scale": f"gradients of the first step fit with {self.scale:g}"
            if scaled(self.dtype)
            else f"{self.dtype} has the exponents of float32",
        }
        return {"deny": tuple(denied), "reasons": reasons}

    def _reason(self, pattern: str, kept: Iterable[str]) -> str:
        """Return a module's error in the first step that was watched, and in a later one where it is larger."""
        name = next((name for name in kept if glob.escape(name) == pattern), None)
        if name is None:
            return "and all inside"
        errors = self.worst.get(name, {})
        broken = next((step for step, error in errors.items() if math.isinf(error)), None)
        if broken is not None:
            return f"not finite in {self.dtype} in step {broken}"
        first = errors.get(1, 0.0)
        last = max(errors, key=lambda step: errors[step], default=1)
        later = f", {errors[last]:.2g} in step {last}" if last > 1 and errors[last] > 2 * first else ""
        return f"relative error of {first:.2g} in {self.dtype} in step 1{later}"

    def hopeless(self, whole: bool) -> dict[str, Any]:
        what = "the output is" if self.for_inference else "losses are"
        reason = f"in {self.dtype} {what} not within {self.tolerance:.2g} of float32's"
        if self.unnamed:
            why = _nothing_watched(self.trial, self.reference)
            raise TrialError(f"{reason}, and no list of operations cures that: {why}")
        which = "but with the whole model in float32" if whole else "whichever modules are kept in it"
        return in_float32(f"{reason} {which}", agrees=False)

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

    def loss_error(self, outcome: Outcome) -> float:
        """Return how far losses are from float32's, relative to their norm."""
        pairs = [
            (low, wide)
            for low, wide in zip(outcome.losses, self.reference.losses, strict=False)
            if low is not None and wide is not None
        ]
        if not pairs:
            raise TrialError(
                f"{self.trial.program.name} has no losses that can be compared: this backend does not report them; "
                f"accepted: one that does. Use ampx.tune(step, model) in code."
            )
        lows, wides = np.array(pairs).T
        return relative_error(lows, wides)

    def check_repeatable(self) -> None:
        """Raise unless a second run in float32 agrees with the first: else precision would be blamed for it."""
        again = self.run(replace(self.trial, settings=replace(self.trial.settings, dtype=FLOAT32.dtype)))
        if any(loss is not None for loss in again.losses) and self.loss_error(again) > self.tolerance:
            raise TrialError(not_repeatable(self.trial.program))

    def agrees(self, outcome: Outcome) -> bool:
        """Return whether losses and skipped steps agree with float32's, and the gradients of the first step.

        A loss may agree by chance, or because it does not move in so few steps. For inference only the output of the
        first step counts.
        """
        if self.for_inference:
            key = self.output, "forward"
            outputs, low = (
                [entry for entry in run.readings.get(1, ()) if (entry.module, entry.direction) == key]
                for run in (self.reference, outcome)
            )
            errors = [entry.error for entry in module_errors(outputs, low, self.dtype)]
            return bool(errors) and max(errors) <= self.tolerance
        if outcome.skipped or self.loss_error(outcome) > self.tolerance:
            return False
        gross = max(self.tolerance, _GROSS)
        for entry in step_errors(self.reference, outcome, 1, self.dtype):
            if math.isinf(entry.error) or (entry.direction == "backward" and entry.error > gross):
                return False
        samples, references = (_gradients(run.unscaled_readings(1)) for run in (outcome, self.reference))
        common = [key for key in references if key in samples and samples[key].shape == references[key].shape]
        if not common:
            return True
        joined = [np.concatenate([gradients[key] for key in common]) for gradients in (samples, references)]
        return relative_error(*joined) <= self.tolerance


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


def _gradients(readings: Iterable[Reading]) -> dict[tuple[str, int], Any]:
    """Return the sampled gradients of the outputs of modules."""
    return {
        (entry.module, entry.call): entry.sample
        for entry in readings
        if entry.direction == "backward" and not entry.operation and entry.sample is not None
    }


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
    progress: Callable[[str], Any] = lambda text: None,
) -> tuple[TunedPolicy, dict[str, Any]]:
    """Return the policy, and the report, whose layout docs/reference/cli.md tells.

    Args:
        program: The script.
        settings: As for `ampx run`.
        framework: The only framework to automate.
        steps: End every run after so many steps.
        tolerance: How far losses may be from float32's, relative to their norm; by default what rounding explains,
            and at most a quarter.
        for_inference: Compare the output of the model in the first step, and nothing else.
        what_if: A dtype to simulate, whatever the device computes.
        repeats: Rounds of timed runs; 0 measures no speed.
        seed: What random numbers start from.
        run: Runs a trial.
        progress: Is called with what is done now.

    Raises:
        TrialError: A run failed, or the backend cannot watch modules.
    """
    warm_up = warm_up_of(steps, 5)
    trial = Trial(program, settings, framework, seed, 1 if for_inference else steps, warm_up, shares_compiled=True)
    timed = repeats > 0 and what_if is None and not for_inference
    disturbance = busy() if timed else []
    dtype, why = what_if or settings.dtype, "float32 was asked for"
    if what_if is None and dtype != "auto":
        dtype = normalise_dtype(dtype)
    search = _ScriptSearch(trial, dtype, for_inference, what_if is not None, timed, run, progress)
    if dtype == "auto":
        probe = run(replace(trial, steps=1))
        dtype, why = probe.dtype, probe.run["reason"]
        if dtype == FLOAT32.dtype and probe.native:  # whether it pays is what tune measures
            dtype = probe.native[0]
    search.begin(dtype, tolerance)
    if dtype == FLOAT32.dtype:
        why = f"mixed precision is off on this device: {why}; --what-if float16 simulates it"
        policy = search.policy(**in_float32(why))
        return policy, _report(search, policy)
    if not search.agrees(search.first):
        search.check_repeatable()
    policy = searched(search, repeats if timed else 0)
    report = _report(search, policy)
    report["notes"] += disturbance if policy.agrees else []
    if report["exclusions"]:
        pytorch = policy.framework == "torch"
        report["notes"].append(_for_tensorrt(policy, report["exclusions"]))
        report["notes"].append(_EXPORTED if pytorch else _EXPORTED_ELSEWHERE.format(policy.framework))
    if search.unnamed:
        report["notes"].append(
            f"No part of {program.name} has a name: losses alone were compared, and no part was tried in float32 by "
            f"itself. {how_to_name(search.reference)}."
        )
    return policy, report


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


def _report(search: _ScriptSearch, policy: TunedPolicy) -> dict[str, Any]:
    trial = search.trial
    file = policy.file
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
        "exclusions": list(exclusions(policy)) if search.for_inference else [],
        **{name: {dtype: run[name] for dtype, run in runs.items()} for name in ("losses", "losses_of")},
        "map": error_map(search.errors),
        "verdict": verdict,
        "notes": [*search.reference.notes, *([_SIMULATED] if search.simulated else [])],
        "origin": origin(search.reference.versions),
    }
