"""`ampx diagnose`: the step of an unedited script that fails, run again with watchers, in its dtype and in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ampx.errors import TrialError
from ampx.run import RunSettings, SampledGradient
from ampx.run.page import origin
from ampx.run.program import Program

from .batch import Seen, plain
from .diagnose import SAMPLES, Diagnosis, Refusal, examined, first_failing
from .operations import normalised
from .probe import Reading, Replayed, Stats, Watching
from .trial import DIFFERS, Outcome, Trial, run_trial
from .tune import inside

SCHEMA: Final = "ampx.diagnose/1"
# What reads a variable in TensorFlow, as `normalised` has it.
_READ: Final = "readvariable"
_BEFORE: Final = (1, 2, 4, 8)  # steps before the one that fails, for the map
# Where nothing fails this step is looked at, or the last before it that was not skipped: early, to cost little.
_HEALTHY: Final = 20


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
    """Return the diagnosis, None where nothing failed, and the report, whose layout docs/reference/cli.md tells.

    Where nothing fails, an early step is looked at all the same: for a loss that is finite and wrong, and for risks.

    Args:
        program: The script.
        settings: As for `ampx run`.
        framework: The only framework to automate.
        at: The step to look at; by default the first with a loss that is not finite, in which the scale collapses, or
            that raises; else the last that was skipped, where half of all were.
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
        notes += [*_off(settings, first), *first.notes]
        if first.fault is not None:
            step, what = first.fault
        elif first.raised is not None:
            step, what = first.steps + 1, "exception"
        elif 2 * len(first.skipped) >= first.steps:  # which trains nothing, though no loss fails
            step, what = first.skipped[-1], "skipped"
        else:
            step, what = max(set(range(1, min(first.steps, _HEALTHY) + 1)) - set(first.skipped), default=None), ""
            if step is None or first.dtype == "float32" or not first.watches:
                return None, _report(trial, first, None, None, "", notes)
    assert step is not None
    try:
        return _look(trial, step, what, first, notes, run, progress)
    except TrialError as error:
        if what or first is None:
            raise
        notes.append(f"What may do harm elsewhere was not looked for: {error}")
        return None, _report(trial, first, None, None, "", notes)


def _look(
    trial: Trial,
    step: int,
    what: str,
    first: Outcome | None,
    notes: list[str],
    run: Callable[[Trial], Outcome],
    progress: Callable[[str], Any],
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
    """
    program, settings = trial.program, trial.settings
    before = tuple(sorted({max(1, step - distance) for distance in (0, *_BEFORE)}))
    watched = replace(
        trial,
        settings=replace(settings, watched=True),
        steps=step,
        watched=(step,),
        gradients=before,  # in adversarial training, optimizers take turns
        watching=Watching("float16", operations=True, samples=SAMPLES),
        stop_at_fault=False,
    )
    progress(f"{program.name}: step {step} again, watched …")
    low = _reach(replace(watched, watched=before), step, run)
    dtype = low.dtype
    if (
        first is not None
        and what == "loss"
        and _loss(low, step) != _loss(first, step)
        and math.isfinite(_loss(low, step))
    ):
        notes.append(f"The loss was finite when the step was run again: the script {DIFFERS}.")
    reference = low
    if dtype != "float32":
        progress(f"{program.name}: step {step} again, in float32 …")
        if step == 1:  # before the first step there is no session whose casting could be switched off
            exact = replace(watched, settings=replace(watched.settings, dtype="float32"))
        else:
            exact = replace(watched, settings=replace(watched.settings, dtype=dtype), float32=(step,))
        reference = _reach(exact, step, run)
    if reference.raised is not None:
        raise TrialError(
            f"{program.name} raises after {reference.steps} steps in float32, too: {' in '.join(reference.raised)}; "
            f"accepted: a script that trains in float32. Mend that first: precision is innocent."
        )

    def again(scale: float) -> Seen:
        progress(f"{program.name}: step {step} again, with a loss scale of {scale:g} …")
        return _seen(_reach(replace(watched, settings=replace(watched.settings, loss_scale=scale)), step, run), step)

    exact_step = _seen(reference, step)
    low_step = exact_step if reference is low else _refusal(low, step) or _seen(low, step)
    diagnosis = examined(low_step, exact_step, dtype, low.scale_at(step), again)
    if not isinstance(low_step, Refusal):
        notes += [*_off(settings, low), *(note for outcome in (low, reference) for note in outcome.notes)]
    report = _report(trial, first or low, low, diagnosis, what, notes, step)
    return (diagnosis if what or diagnosis.kind != "healthy" else None), report


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
    readings, trained = outcome.readings[step], _trained(outcome)
    gradients = {name: entry.values for name, entry in trained.get(step, {}).items() if entry.values is not None}
    shapes = {name: entry.shape for sampled in trained.values() for name, entry in sampled.items()}
    replayed = Replayed(_loss(outcome, step), gradients, parameters_of(readings))
    return Seen(replayed, readings, shapes, step in outcome.skipped)


def _refusal(outcome: Outcome, step: int) -> Refusal | None:
    """Return what a step raised; None where it did not, or of values that were not finite."""
    readings = outcome.readings.get(step, ())
    if outcome.raised is None or outcome.steps >= step or any(entry.value.nonfinite for entry in readings):
        return None
    message, line = outcome.raised
    return Refusal(message, readings, line)


def _trained(outcome: Outcome) -> dict[int, dict[str, SampledGradient]]:
    """Return by step and name what was trained; where optimizers take turns, names say whose they are."""
    owners = dict(enumerate(outcome.losses_of, 1))
    several = len({owners.get(step) for step in outcome.gradients}) > 1

    def name_of(step: int, entry: SampledGradient) -> str:
        owner = owners.get(step) if several else None
        return entry.name if owner is None else f"{entry.name} of {owner}"

    return {step: {name_of(step, entry): entry for entry in seen} for step, seen in outcome.gradients.items()}


def parameters_of(readings: Sequence[Reading]) -> dict[str, Stats]:
    """Return, by module, what is known of its parameters.

    Some frameworks read them by an operation of their own. Of others they are what the operations of a module received
    beyond what the module received, where that stands out: magnitudes beyond those of the module's inputs, and elements
    that are not finite. Only the first operation of a module counts, before any module inside has computed anything:
    others receive what was computed.
    """
    forward = [entry for entry in readings if entry.direction == "forward"]
    read = [entry for entry in forward if entry.kind and normalised(entry.operation) == _READ]
    if read:
        return {_parameters(module): _joined(read, module) for module in dict.fromkeys(entry.module for entry in read)}
    inputs = {entry.module: entry.inputs for entry in reversed(forward) if not entry.operation}  # of the first call
    failing = first_failing(readings, None)
    parameters: dict[str, Stats] = {}
    begun: set[str] = set()
    for entry in forward:
        received = inputs.get(entry.module)
        first = entry.module not in begun
        begun.update(name for name in inputs if entry.module == name or inside(entry.module, name))
        if entry.operation and entry.kind and first and received is not None:  # no kind: outside of all modules
            own = entry.inputs
            # A value may be received twice, as by x * x.
            times = max(1, own.elements // received.elements) if received.elements else 1
            larger = own.largest > received.largest and own.elements > received.elements
            if own.nonfinite > times * received.nonfinite or larger:
                parameters[_parameters(entry.module)] = Stats(
                    elements=own.elements - received.elements,
                    nonfinite=max(0, own.nonfinite - times * received.nonfinite),
                    largest=own.largest,
                )
        if failing is not None and entry is readings[failing]:
            break  # what comes later receives what it made
    return parameters


def _joined(read: Sequence[Reading], module: str) -> Stats:
    values = [entry.value for entry in read if entry.module == module]
    return Stats(
        elements=sum(value.elements for value in values),
        nonfinite=sum(value.nonfinite for value in values),
        largest=max(value.largest for value in values),
    )


def _parameters(module: str) -> str:
    return f"{module}.parameters" if module else "parameters"


def _skips(skipped: Sequence[int]) -> str:
    count = "1 step was skipped" if len(skipped) == 1 else f"{len(skipped)} steps were skipped"
    return f"{count} (--at {skipped[0]} looks at the first)" if skipped else count


def _map(low: Outcome) -> dict[str, Any]:
    """Return by module and watched step the largest magnitude of its output; None where it is not finite."""
    columns: dict[int, dict[str, float | None]] = {}
    for step, readings in sorted(low.readings.items()):
        column = columns.setdefault(step, {})
        for entry in readings:
            if entry.direction == "forward" and not entry.operation:
                largest = column.get(entry.module, 0.0)
                broken = largest is None or entry.value.nonfinite
                column[entry.module] = None if broken else max(entry.value.largest, largest or 0.0)
    modules = list(dict.fromkeys(module for column in reversed(columns.values()) for module in column))
    return {
        "modules": modules,
        "steps": list(columns),
        "largest": [[column.get(module) for column in columns.values()] for module in modules],
    }


def _report(
    trial: Trial,
    seen: Outcome,
    low: Outcome | None,
    diagnosis: Diagnosis | None,
    what: str,
    notes: Sequence[str],
    step: int | None = None,
) -> dict[str, Any]:
    facts: Mapping[str, Any] = seen.run
    modules: list[dict[str, Any]] = []
    if low is not None and step is not None:
        modules = [
            {
                name: plain(getattr(entry, name))
                for name in ("module", "kind", "direction", "call", "dtype", "value", "inputs")
            }
            for entry in low.readings.get(step, ())
            if not entry.operation
        ]
    risks = () if diagnosis is None else diagnosis.risks
    looked_at = step if diagnosis is not None else None
    if diagnosis is None or (not what and diagnosis.kind == "healthy"):
        reported = any(loss is not None for loss in seen.losses)
        losses = "the losses are finite" if reported else "no loss was seen"
        verdict = (
            f"Nothing failed in {seen.steps} steps in {seen.dtype}: {losses}, {_skips(seen.skipped)}, and the loss "
            f"scale is {seen.last_scale or 1:g}."
        )
        if looked_at is not None:
            seen_there = "some risks, which did no harm" if risks else "no risks"
            verdict += f" Step {looked_at} was compared with float32: every module agrees, and there are {seen_there}."
        diagnosis, step = None, None
    else:
        verdict = f"Step {step}: {diagnosis.kind}: {diagnosis.why}"
    run = seen.to_json()
    return {
        "schema": SCHEMA,
        "script": trial.program.name,
        "arguments": list(trial.program.arguments),
        "framework": facts["framework"],
        "device": facts["device"],
        "dtype": seen.dtype,
        "level": facts["level"],
        "seed": trial.seed,
        "steps": seen.steps,
        "step": step,
        "looked_at": looked_at,
        "fault": what or (None if diagnosis is None else "wrong"),
        **{name: run[name] for name in ("losses", "losses_of")},
        "skipped": seen.skipped,
        "diagnosis": None if diagnosis is None else diagnosis.to_json(),
        "risks": plain(risks),
        "modules": modules,
        "map": None if low is None else _map(low),
        "verdict": verdict,
        "mistakes": list(dict.fromkeys((*seen.mistakes, *(() if low is None else low.mistakes)))),
        "notes": list(dict.fromkeys(notes)),
        "origin": origin(seen.versions),
    }
