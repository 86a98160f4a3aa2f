"""`ampx compare`: an unedited script in float32 and in mixed precision, side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

import numpy as np

from ampx.errors import InvalidOptionError, TrialError
from ampx.formats import FORMATS, spelled
from ampx.run import RunSettings
from ampx.run.page import origin
from ampx.run.program import Program

from .batch import Seen, plain
from .causes import lost_gradients
from .compare import WORST, ModuleError, error_map, listed_names, padded, relative_error, worst_errors
from .diagnose import SAMPLES
from .diagnose_script import Noise, Parting, Runs, noise_of, rounded_weights, settled_scale
from .meter import LOST
from .probe import Replayed, Watching
from .timing import busy, speed_in_words
from .tolerance import Distance, by_rounding
from .trial import (
    GROWN,
    TIMED_STEPS,
    Outcome,
    Trial,
    how_to_name,
    not_repeatable,
    run_trial,
    step_errors,
    warm_up_of,
)

SCHEMA: Final = "ampx.compare/1"
# What a comparison on a CPU cannot say.
_ON_CPU: Final = (
    "This was measured on a CPU. Tensor Cores of a GPU compute matrix products in 16 bits several times as fast as in "
    "float32, and activations in half the memory: large models gain more there, small ones nothing. Compare on the "
    "machine that will train."
)
REFERENCE: Final = "float32"
# Two losses agree that differ by no more than so many roundings of the dtype.
ROUNDINGS: Final = 8
# Below this a ratio of speeds is no difference.
ALIKE: Final = 0.02
# Below this the ratio of one pair of runs, whose spread is unknown, decides nothing.
ALONE: Final = 0.5
_COLUMNS: Final = 6  # watched steps

Runner = Callable[[Trial], Outcome]
Progress = Callable[[str, int | None], Any]


@dataclass(frozen=True)
class Sweep:
    """An option of the script, and the values that it is to have.

    Attributes:
        option: Its name, such as `"--batch-size"`.
        values: As the script reads them.
        joined: Written `--batch-size=32`; else as two arguments.
    """

    option: str
    values: tuple[str, ...]
    joined: bool = True

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Read `"--batch-size=32,64,128"`, or the same with a space.

        Raises:
            InvalidOptionError: It is neither.
        """
        joined = "=" in text
        option, _, values = text.partition("=" if joined else " ")
        parts = tuple(value.strip() for value in values.split(",") if value.strip())
        if not option.strip() or len(parts) < 2:
            raise InvalidOptionError(
                f"--sweep {text!r} cannot be read; accepted: an option of the script and two or more values. Write "
                f"--sweep '--batch-size=32,64,128'."
            )
        return cls(option.strip(), parts, joined)

    def program(self, program: Program, value: str) -> Program:
        """Return the script with one of the values: the last one of an option holds."""
        words = (f"{self.option}={value}",) if self.joined else (self.option, value)
        return replace(program, arguments=(*program.arguments, *words))


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Return the dtypes of `--dtype float16,bfloat16`; `"auto"` as it is.

    Raises:
        InvalidOptionError: One is no low-precision dtype, or there are none.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    dtypes = tuple(dict.fromkeys(map(spelled, names)))
    if not dtypes or REFERENCE in dtypes:
        raise InvalidOptionError(
            f"--dtype {text!r} leaves nothing to compare with float32; accepted: auto, or float16 and bfloat16, with "
            f"commas between. Name one of these."
        )
    return dtypes


def compare_script(
    program: Program,
    settings: RunSettings,
    dtypes: Sequence[str],
    *,
    framework: str | None = None,
    steps: int = 60,
    repeats: int = 3,
    seed: int = 0,
    sweep: Sweep | None = None,
    run: Runner = run_trial,
    progress: Progress = lambda text, left: None,
) -> dict[str, Any]:
    """Return the report, whose layout docs/reference/json.md tells.

    Args:
        program: The script.
        settings: As for `ampx run`; their dtype is not looked at.
        dtypes: What to compare with float32.
        framework: The only framework to automate.
        steps: End each run after so many steps.
        repeats: Pairs of runs that are timed.
        seed: What random numbers start from.
        sweep: Repeat the timing for each of these values.
        run: Runs a trial.
        progress: Is called with what is done now, and how many runs are left, this one included; None for no run.

    Raises:
        InvalidOptionError: The steps are too few for a sweep.
        TrialError: The run in float32 failed, or those in all dtypes did, or computed in float32 though another dtype
            than `"auto"` was asked for.
    """
    disturbance = busy() if repeats else []
    warm_up = warm_up_of(steps, 10)
    if not warm_up:
        _check_steps(steps, sweep)
        progress(
            f"{steps} steps are too few to time (--steps {TIMED_STEPS} or more is timed): every dtype runs once …", None
        )
        repeats = 1
    values = () if sweep is None else sweep.values
    left = count((1 + len(dtypes)) * (repeats * (1 + len(values)) + 1), -1)

    def say(text: str) -> None:
        progress(text, max(1, next(left)))  # "auto" may become several dtypes

    trial = Trial(program, settings, framework, seed, steps, warm_up, block=max(1, (steps - warm_up) // 10))
    timed, failed = _timed_runs(trial, dtypes, repeats, run, say)
    if failed and timed.keys() == {REFERENCE}:
        raise _all_failed(failed)
    references = timed.pop(REFERENCE)
    settled = {name: _settled(trial, name, outcomes[0], run, say) for name, outcomes in timed.items()}
    compared = {
        name: _compare(name, references, outcomes, settled[name], bool(warm_up)) for name, outcomes in timed.items()
    }
    exact, shapes = _watch(trial, timed, references, settled, compared, run, say)
    swept = None
    if sweep is not None:
        points = [_sweep_point(trial, sweep, value, tuple(compared), repeats, run, say) for value in values]
        swept = {"option": sweep.option, "points": points}
    reference, outcomes = references[0], [*references, *(outcome for runs in timed.values() for outcome in runs)]
    return {
        "schema": SCHEMA,
        "script": program.name,
        "arguments": list(program.arguments),
        "framework": reference.run["framework"],
        "device": reference.run["device"],
        "seed": seed,
        "steps": reference.steps,
        "repeats": len(references),
        "warm_up": warm_up,
        "float32": {**_facts(references, bool(warm_up)), "meters": exact},
        "dtypes": compared,
        "failed": {name: str(error) for name, error in failed.items()},
        "sweep": swept,
        "mistakes": list(dict.fromkeys(mistake for outcome in outcomes for mistake in outcome.mistakes)),
        "notes": [*_notes(program, outcomes, timed, compared), *_padded(shapes, compared), *disturbance],
        "verdict": "\n".join(entry["verdict"] for entry in compared.values()) or _nothing_compared(reference),
        "origin": origin(reference.versions),
    }


def _padded(shapes: Sequence[tuple[str, Sequence[int]]], dtypes: Iterable[str]) -> list[str]:
    """Return what costs speed: parameters whose dimensions matrix units pad."""
    return list(dict.fromkeys(note for dtype in dtypes if (note := padded(shapes, dtype)) is not None))


def _check_steps(steps: int, sweep: Sweep | None) -> None:
    """Raise where too few steps are left for a sweep, which times them."""
    if sweep is not None:
        raise InvalidOptionError(
            f"--sweep {sweep.option} times steps, and --steps {steps} leaves none to time; accepted: {TIMED_STEPS} "
            f"or more. Pass more steps."
        )


def _all_failed(failed: Mapping[str, TrialError]) -> TrialError:
    errors = list(failed.values())
    return errors[0] if len(errors) == 1 else TrialError("\n".join(map(str, errors)))


def _nothing_compared(reference: Outcome) -> str:
    return (
        f"Nothing was compared, since `auto` is float32 on this machine: {reference.run['reason']}. To compare all "
        f"the same, name a dtype that it computes by --dtype; `ampx tune --what-if float16` simulates one that it does "
        f"not."
    )


def _notes(
    program: Program,
    outcomes: Sequence[Outcome],
    timed: Mapping[str, Sequence[Outcome]],
    compared: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Return what is to be said besides; the first of the outcomes is in float32."""
    reference = outcomes[0]
    notes = list(dict.fromkeys(note for outcome in outcomes for note in outcome.notes))
    if any(_is_nameless(facts, timed) for facts in compared.items()):
        notes.append(_nameless(reference))
    if any(facts["float32_parts_at"] for facts in compared.values()):
        notes.append(not_repeatable(program))
    return [*notes, _ON_CPU] if reference.run["device"] == "cpu" else notes


def _sweep_point(
    trial: Trial,
    sweep: Sweep,
    value: str,
    dtypes: Sequence[str],
    repeats: int,
    run: Runner,
    progress: Callable[[str], Any],
) -> dict[str, Any]:
    """Time one value of a sweep. What fails there, for memory say, is part of the answer."""
    swept = replace(trial, program=sweep.program(trial.program, value))
    try:
        timed, failed = _timed_runs(swept, dtypes, repeats, run, progress)
    except TrialError as error:
        return {"value": value, "runs": {}, "failed": {REFERENCE: str(error)}}
    return {
        "value": value,
        "runs": {name: _point(timed, name, bool(trial.warm_up)) for name in timed},
        "failed": {name: str(error) for name, error in failed.items()},
    }


def _timed_runs(
    trial: Trial, dtypes: Sequence[str], repeats: int, run: Runner, progress: Callable[[str], Any]
) -> tuple[dict[str, list[Outcome]], dict[str, TrialError]]:
    """Run in float32 and in each dtype, in turn, so that what else the machine does meets all of them.

    "auto" goes first. Where it chooses float32, the dtypes that the device has in hardware take its place, because
    whether they pay is the question; without any, that run is the answer, and no other is waited for.

    Returns:
        The outcomes by dtype, and by dtype what a run failed of.
    """
    outcomes: dict[str, list[Outcome]] = {}
    failed: dict[str, TrialError] = {}
    chosen: dict[str, str] = {}  # by what was asked for, "auto" say
    for repeat in range(repeats):
        if repeat == 1:  # the memory of the first runs is what counts, and theirs alone
            trial = replace(trial, shares_compiled=True)
        for asked in sorted((REFERENCE, *dtypes), key=lambda name: name != "auto"):
            if asked in failed:
                continue
            progress(f"{trial.program.name} in {asked}, run {repeat + 1} of {repeats} …")
            try:
                outcome = _timed_run(trial, asked, run)
            except TrialError as error:
                if asked == REFERENCE:
                    raise
                failed[asked] = error
                outcomes.pop(chosen.get(asked, asked), None)
                continue
            if asked == "auto" and outcome.dtype == REFERENCE:
                others = dict.fromkeys([*outcome.native, *dtypes])
                del others["auto"]
                if not others:
                    return {REFERENCE: [outcome]}, {}  # which is an answer
                return _timed_runs(trial, list(others), repeats, run, progress)
            trial = replace(trial, imported=trial.imported or outcome.imported)
            chosen[asked] = REFERENCE if asked == REFERENCE else outcome.dtype
            outcomes.setdefault(chosen[asked], []).append(outcome)
    return outcomes, failed


def _timed_run(trial: Trial, asked: str, run: Runner) -> Outcome:
    outcome = run(replace(trial, settings=replace(trial.settings, dtype=asked)))
    if asked not in (REFERENCE, "auto") and outcome.dtype == REFERENCE:
        raise TrialError(
            f"{trial.program.name} computed in float32 when it was run in {asked}: {outcome.run['reason']}; "
            f"accepted: a dtype that this device computes. Name one by --dtype."
        )
    return outcome


def _settled(trial: Trial, name: str, outcome: Outcome, run: Runner, progress: Callable[[str], Any]) -> Outcome:
    """Return a run whose losses tell of the dtype: where steps were skipped, one at a scale at which fewer are.

    While the loss scale settles, each skipped step puts the training back by one, and that is no matter of precision.
    """
    first = outcome.run["optimizers"][0]["initial_scale"] if outcome.run["optimizers"] else 0.0
    scale, skipped = outcome.last_scale, outcome.skipped
    before = outcome.losses[: skipped[0]] if skipped else ()
    finite = all(loss is None or math.isfinite(loss) for loss in before)
    if not skipped or not finite or scale is None or scale >= first:
        return outcome
    scale = settled_scale(outcome)
    progress(f"{trial.program.name} in {name} at a loss scale of {scale:g}, for steps were skipped …")
    settings = replace(trial.settings, dtype=name, loss_scale=scale)
    again = run(replace(trial, settings=settings, shares_compiled=True, imported=outcome.imported))
    return again if len(again.skipped) < len(skipped) else outcome


def _compare(
    name: str, references: Sequence[Outcome], outcomes: Sequence[Outcome], settled: Outcome, warm: bool
) -> dict[str, Any]:
    facts = _facts(outcomes, warm)
    again = {"scale": settled.last_scale, "skipped": settled.skipped}
    facts["settled"] = None if settled is outcomes[0] else again
    facts["reason"] = outcomes[0].run["reason"]
    facts["speed"] = _paired(references, outcomes) if warm else None
    facts["memory_ratio"] = _ratio(outcomes[0].peak_memory, references[0].peak_memory)
    facts["float32_fails"] = _failing(references[0])
    facts["parts_at"] = parting(references[0].losses, settled.losses, name)
    curves, others = references[0].curves(), settled.curves()
    pairs = zip(curves, others, strict=False)
    facts["ends_alike"] = 0 < len(curves) == len(others) and all(ends_alike(*pair, name) for pair in pairs)
    facts["noise"] = None
    return facts


def _facts(outcomes: Sequence[Outcome], warm: bool) -> dict[str, Any]:
    """Return what was seen of the runs in one dtype; steps that did not warm up are not timed."""
    seconds = [outcome.seconds_a_step for outcome in outcomes if warm and outcome.seconds_a_step is not None]
    first = outcomes[0]
    return {
        **first.to_json(),
        "steps_a_second": 1 / statistics.median(seconds) if seconds else None,
        "peak_memory": first.peak_memory,
    }


def _point(runs: Mapping[str, Sequence[Outcome]], name: str, warm: bool) -> dict[str, Any]:
    facts = _facts(runs[name], warm)
    speed = _paired(runs[REFERENCE], runs[name]) if warm and name != REFERENCE else None
    return {"steps_a_second": facts["steps_a_second"], "peak_memory": facts["peak_memory"], "speed": speed}


def _paired(references: Sequence[Outcome], outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Return the ratio of speeds: the median of the pairs, and the least and the largest of them."""
    pairs = [
        reference.seconds_a_step / outcome.seconds_a_step
        for reference, outcome in zip(references, outcomes, strict=True)
        if reference.seconds_a_step and outcome.seconds_a_step
    ]
    if not pairs:
        return None
    return {"ratio": statistics.median(pairs), "least": min(pairs), "largest": max(pairs), "pairs": pairs}


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference


def _failing(outcome: Outcome) -> str | None:
    """Return what is wrong with a run in float32, whose losses or gradients fail or diverge; None for nothing."""
    broken = {step: "gradients are" for step in outcome.skipped}
    losses = enumerate(outcome.losses, 1)
    broken |= {step: "loss is" for step, loss in losses if loss is not None and not math.isfinite(loss)}
    if broken:
        first = min(broken)
        return f"float32 itself fails: its {broken[first]} not finite at step {first}"
    for curve in outcome.curves():
        own = [loss for loss in curve if loss is not None]
        if own and own[-1] > GROWN * abs(own[0]) > 0:  # what falls below zero, as a critic's loss, does not diverge
            return f"float32 itself diverges: its loss goes from {own[0]:.3g} to {own[-1]:.3g}"
    return None


def parting(reference: Sequence[float | None], losses: Sequence[float | None], dtype: str) -> int | None:
    """Return the first step, from 1, whose losses differ by more than `ROUNDINGS` roundings of a dtype, or None."""
    bound = ROUNDINGS * 2.0 ** -FORMATS[dtype].bits
    for step, (wide, low) in enumerate(zip(reference, losses, strict=False), 1):
        if wide is None or low is None or (not math.isfinite(wide) and not math.isfinite(low)):
            continue
        if not math.isfinite(low) or not math.isfinite(wide) or abs(wide - low) > bound * max(abs(wide), abs(low)):
            return step
    return None


def ends_alike(reference: Sequence[float | None], losses: Sequence[float | None], dtype: str) -> bool:
    """Return whether two trainings end alike: the means of their last quarters differ by less than rounding explains.

    Or by less than the losses of the reference vary there.
    """
    pairs = [(wide, low) for wide, low in zip(reference, losses, strict=False) if wide is not None and low is not None]
    quarter = pairs[-max(1, len(pairs) // 4) :]
    wides, lows = [wide for wide, _ in quarter], [low for _, low in quarter]
    if not quarter or not all(map(math.isfinite, (*wides, *(low for _, low in pairs)))):
        return False
    wide, low = statistics.fmean(wides), statistics.fmean(lows)
    bound = ROUNDINGS * 2.0 ** -FORMATS[dtype].bits * max(abs(wide), abs(low))
    return abs(wide - low) <= max(bound, statistics.pstdev(wides))


def verdict(name: str, facts: Mapping[str, Any]) -> str:
    """Return lines: what fails or that it agrees, and why; what was seen to cure it; speed and memory."""
    fault, worth = facts["fault"], _worth(facts)
    doubt = DOUBTS.get(doubt_of(facts), "")
    losses = f"{', '.join(_seen_of_losses(facts))}{doubt}."
    what = [f"in step {fault['step']}, {fault['why']}", f"{losses[0].upper()}{losses[1:]}"] if fault else [losses]
    lines = [" ".join([f"{name}:", *what, *facts["mistakes"]])]
    lines += [f"Cure, tried: {fault['cure']}."] if fault and fault["cure"] else []
    return "\n".join([*lines, f"{', '.join(_cost(facts))}{'' if doubt else f': {worth}'}."])


def _seen_of_losses(facts: Mapping[str, Any]) -> list[str]:
    """Return whether the losses agree, and what harms a training though they do."""
    lost, skipped = facts["lost"], len(_skipped(facts))
    parts = [_of_losses(facts)]
    if lost["dtype"] >= LOST:
        parts.append(f"{lost['dtype']:.0%} of the updates are rounded away ({lost['float32']:.0%} in float32)")
    if facts["flushed"]:
        parts.append(f"gradients of {listed_names(facts['flushed'])} underflow to zero")
    if facts["rounded"] and not facts["fault"]:
        parts.append(
            f"weights of {listed_names(facts['rounded'])} are written back in low precision, which they are not in "
            f"float32, and smaller updates are rounded away"
        )
    if facts["fault"] and facts["fault"]["by_hand"]:
        parts.append("but float32 itself overflows where the script casts by hand")
    if _skips_most(facts):
        parts.append(f"{skipped} of {facts['steps']} steps were skipped")
    return parts


def _cost(facts: Mapping[str, Any]) -> list[str]:
    """Return speed and memory."""
    speed, memory = facts["speed"], facts["memory_ratio"]
    few = f"{facts['steps']} {'step is' if facts['steps'] == 1 else 'steps are'} too few to time"
    ratio = few if speed is None else speed_in_words(speed["pairs"])
    return [ratio, *([] if memory is None else [f"{memory:.2f} times the memory"])]


_CHECK: Final = ": check this before you rely on it"
DOUBTS: Final[dict[str | None, str]] = {
    "float32 fails": ": mend that first, for precision is not the cause",
    "fault": _CHECK,
    "not repeatable": ": make the script repeatable first",
    "differs": _CHECK,
}


def doubt_of(facts: Mapping[str, Any]) -> str | None:
    """Return what is to be looked into before speed counts, a key of `DOUBTS`; None for nothing."""
    lost, exact = facts["lost"]["dtype"], facts["lost"]["float32"]
    doubts = {
        "float32 fails": facts["float32_fails"] is not None,
        "fault": _skips_most(facts) or any(facts[name] for name in ("flushed", "fault", "mistakes")),
        "not repeatable": facts["float32_parts_at"] is not None,
        "differs": not facts["ends_alike"] or (lost >= LOST and lost > 1.1 * exact),
    }
    return next((doubt for doubt, holds in doubts.items() if holds), None)


def _worth(facts: Mapping[str, Any]) -> str:
    """Return whether speed and memory are worth it."""
    speed, memory = _speed_decided(facts["speed"]), facts["memory_ratio"]
    smaller = memory is not None and memory < 1 - 5 * ALIKE
    conclusions = (
        (speed is None, "more steps, by --steps or by the script, decide whether it is worth it"),
        (speed == "faster" or (smaller and speed != "slower"), "worth it"),
        (speed == "slower", "not worth it on this machine"),
        (speed == "undecided", "more --repeats on a quiet machine decide whether it is worth it"),
    )
    return next((words for holds, words in conclusions if holds), "no gain on this machine")


def _skips_most(facts: Mapping[str, Any]) -> bool:
    return bool(0 < facts["steps"] <= 2 * len(_skipped(facts)))


def _skipped(facts: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the skipped steps in the run whose losses are compared."""
    return list((facts["settled"] or facts)["skipped"])


def _speed_decided(speed: Mapping[str, Any] | None) -> str | None:
    """Return "faster", "slower", "alike" or "undecided"; None where nothing was timed."""
    if speed is None:
        return None
    alone = len(speed["pairs"]) == 1
    margin = ALONE if alone else ALIKE
    below, above = speed["least"] < 1 - ALIKE, speed["largest"] > 1 + ALIKE
    if speed["least"] > 1 + margin:
        return "faster"
    if speed["largest"] < 1 / (1 + margin):
        return "slower"
    return "undecided" if (below or above if alone else below and above) else "alike"


def _of_losses(facts: Mapping[str, Any]) -> str:
    losses, parts_at = facts["losses"], facts["parts_at"]
    if all(loss is None for loss in losses):
        return "the losses are not known"
    if facts["float32_fails"] is not None:
        return str(facts["float32_fails"])
    if facts["float32_parts_at"] is not None:
        return (
            f"two runs in float32 differ from each other at step {facts['float32_parts_at']}, so losses cannot be "
            f"compared"
        )
    settled = f" at a loss scale of {facts['settled']['scale']:g}" if facts["settled"] else ""
    if parts_at is None:
        return f"the loss agrees with float32's within rounding in all {len(losses)} steps{settled}"
    before = ", ".join(str(step) for step in _skipped(facts) if step <= parts_at)
    skips = settled + (f" (step {before} skipped)" if before else "")
    return f"the loss first differs from float32's at step {parts_at} of {len(losses)}{skips}, and {_end(facts)}"


def _end(facts: Mapping[str, Any]) -> str:
    broken = sum(isinstance(loss, str) for loss in facts["losses"])
    if facts["noise"] is not None:
        return "stays within the rounding noise of the script"
    if facts["ends_alike"]:
        return "agrees at the end"
    return f"is not finite in {broken} step{'s' if broken > 1 else ''}" if broken else "still differs at the end"


def _is_nameless(facts: tuple[str, Mapping[str, Any]], timed: Mapping[str, Sequence[Outcome]]) -> bool:
    """Return whether modules were watched in a dtype, and there were none."""
    name, seen = facts
    return timed[name][0].watches and seen["modules"] is None and seen["float32_parts_at"] is None


def _nameless(outcome: Outcome) -> str:
    return f"No module computed anything that could be compared by name. {how_to_name(outcome)}."


# -- modules ---------------------------------------------------------------------------------------


def _watch(
    trial: Trial,
    timed: Mapping[str, Sequence[Outcome]],
    references: Sequence[Outcome],
    settled: Mapping[str, Outcome],
    compared: Mapping[str, dict[str, Any]],
    run: Runner,
    progress: Callable[[str], Any],
) -> tuple[list[Any], list[tuple[str, tuple[int, ...]]]]:
    """Run again in float32 and in each dtype, with modules watched in some steps and updates metered.

    Args:
        trial: A timed run.
        timed: The timed runs by dtype.
        references: Those in float32.
        settled: By dtype, the run whose losses are compared.
        compared: What was seen of them, to which `modules`, `meters` and `verdict` are added.
        run: Runs a trial.
        progress: Is called with what is done now.

    Returns:
        The meters of the run in float32, and the names and shapes of the parameters.
    """
    last = min(outcomes[0].steps for outcomes in (references, *timed.values()))
    spread = {1, *(1 + (last - 1) * part // (_COLUMNS - 1) for part in range(_COLUMNS))}
    same = replace(trial, warm_up=0, block=1, shares_compiled=True, imported=references[0].imported)
    chosen = {
        name: _look(facts, references[0], settled[name], noise_of(same, name, run, progress))
        for name, facts in compared.items()
    }
    steps = tuple(sorted(spread | {look.step for look in chosen.values()}))
    settings = replace(trial.settings, watched=True, meter_every=max(1, last // _COLUMNS))
    watched = replace(
        same,
        settings=settings,
        steps=steps[-1],
        watched=steps,
        gradients=steps,  # in adversarial training, optimizers take turns
        watching=Watching("float16", operations=True, samples=SAMPLES),
        operations_in=tuple({look.step for look in chosen.values()}),
    )
    names = [name for name, outcomes in timed.items() if outcomes[0].watches]
    outcomes = {}
    for name in (REFERENCE, *names) if names else ():
        progress(f"Watching modules and updates in {name} …")
        scale = settings.loss_scale if name == REFERENCE else _scale(compared[name])
        outcomes[name] = run(replace(watched, settings=replace(settings, dtype=name, loss_scale=scale)))
    for name, facts in compared.items():
        facts.update(_watched_facts(watched, name, facts, chosen[name], references, outcomes, run, progress))
        facts |= {"doubt": doubt_of(facts), "verdict": verdict(name, facts)}
    if not outcomes:
        return [], []
    exact = outcomes[REFERENCE]
    shapes = dict.fromkeys((entry.name, entry.shape) for own in exact.gradients.values() for entry in own)
    return list(exact.run["meters"]), list(shapes)


def _watched_facts(
    watched: Trial,
    name: str,
    facts: Mapping[str, Any],
    look: _Look,
    references: Sequence[Outcome],
    outcomes: Mapping[str, Outcome],
    run: Runner,
    progress: Callable[[str], Any],
) -> dict[str, Any]:
    """Return what watched runs tell of a dtype, beside `facts`; less where it was not watched."""
    low, exact = outcomes.get(name), outcomes.get(REFERENCE)
    again = [*references[1:], *([] if exact is None else [exact])]
    seen: dict[str, Any] = {
        "meters": [] if low is None else low.run["meters"],
        "lost": {REFERENCE: _lost(exact), "dtype": _lost(low)},
        "float32_parts_at": _differs(references[0], again, name, facts["parts_at"]),
        "modules": None,
        "mistakes": [] if low is None else list(low.mistakes),
        "fault": None,
        "flushed": [],
        "rounded": [],
    }
    if low is None or exact is None:
        return seen
    seen["rounded"] = [*rounded_weights(low, lambda: exact)]
    seen["flushed"] = lost_gradients(_first_step(low), _first_step(exact))
    if seen["float32_parts_at"] is not None:
        return seen
    trial = replace(watched, settings=replace(watched.settings, dtype=name, loss_scale=_scale(facts)), may_raise=True)
    first = None
    if facts["float32_fails"] is None:
        seen["fault"], first = _fault(trial, look, exact, low, run, progress)
    seen["modules"] = _modules(watched, name, first, exact, low)
    if _ends_elsewhere(facts, low) and seen["fault"] is None:
        seen |= _noise(look, exact, low)
    return seen


def _first_step(outcome: Outcome) -> Seen:
    """Return the gradients of the first step: its weights are the same in every run."""
    gradients = {entry.name: entry.values for entry in outcome.gradients.get(1, ()) if entry.values is not None}
    return Seen(Replayed(0.0, gradients, {}))


def _differs(reference: Outcome, again: Sequence[Outcome], name: str, parts_at: int | None) -> int | None:
    """Return the step in which runs in float32 part from each other; None where the dtype parts before that, or never.

    A script that draws other numbers in every run, or goes on from a checkpoint of the last, is no matter of precision.
    """
    steps = [step for run in again if (step := parting(reference.losses, run.losses, name)) is not None]
    return min(steps) if parts_at is not None and steps and min(steps) <= parts_at else None


def _lost(outcome: Outcome | None) -> float:
    """Return the share of updates that rounded to nothing, of the optimizer that lost most; 0 without a meter."""
    return max((meter["last"]["lost"] for meter in (outcome.run["meters"] if outcome else ())), default=0.0)


def _scale(facts: Mapping[str, Any]) -> float | None:
    """Return the loss scale of the run whose losses are compared; None for that of `ampx run`."""
    return facts["settled"]["scale"] if facts["settled"] else None


@dataclass(frozen=True)
class _Look:
    """A step that is diagnosed.

    Attributes:
        step: Its number.
        parting: How far losses are from float32's.
        noise: What rounding alone does to the script.
    """

    step: int
    parting: Parting
    noise: Noise


def _look(facts: Mapping[str, Any], reference: Outcome, low: Outcome, noise: Noise) -> _Look:
    """Return the step that is diagnosed.

    If losses differ, it is the step at which `ampx diagnose` looks. If some loss is not finite or a step was skipped,
    it is the last skipped step up to the first loss that differs, or else the step of that loss: a skipped step may be
    why the next loss differs. If nothing differs, it is the first step.
    """
    parts_at = facts["parts_at"]
    broken = any(loss is not None and not math.isfinite(loss) for loss in low.losses)
    if parts_at is None or broken or low.skipped:
        step = max((step for step in low.skipped if step <= (parts_at or 0)), default=parts_at or 1)
        return _Look(step, Parting({}), noise)
    parting = Parting.of(reference, low, noise)
    return _Look(parting.step(low) or 1, parting, noise)


def _fault(
    trial: Trial, look: _Look, reference: Outcome, low: Outcome, run: Runner, progress: Callable[[str], Any]
) -> tuple[dict[str, Any] | None, ModuleError | None]:
    """Return what `ampx diagnose` finds in a step, and the value of a module that it names; None for nothing.

    That a value differs accuses no module: what it was computed of may have lost the digits, and every value differs
    where a training has gone another way for reasons of its own. A diagnosis has tried what it says.
    """
    step = look.step
    if not low.readings.get(step):
        return None, None
    try:
        diagnosis, exact = Runs(trial, step, run, progress, reference, look.parting).examined(low)
    except TrialError:  # the step cannot be run again, say
        return None, None
    if diagnosis.kind in ("healthy", "loss scale"):
        return None, None
    place = diagnosis.first_nonfinite
    cures = [str(experiment) for experiment in diagnosis.experiments if experiment.cures]
    said = {"kind": diagnosis.kind, "why": diagnosis.why, "place": plain(place), "by_hand": diagnosis.by_hand}
    said |= {"cure": cures[-1] if cures else None, "advice": diagnosis.advice, "deny": diagnosis.deny}
    fault = {"step": step, **said}
    # What float32 computes alike does not differ. Outside of all modules, or of the model as a whole, none is named.
    if diagnosis.by_hand or place is None or not place.module:
        return fault, None
    errors = step_errors(exact, low, step, diagnosis.dtype)
    own = [entry for entry in errors if (entry.module, entry.direction) == (place.module, place.direction)]
    return fault, max(own, key=lambda entry: entry.error, default=None)


def _ends_elsewhere(facts: Mapping[str, Any], low: Outcome) -> bool:
    """Return whether a training ends elsewhere than in float32, and nothing is seen to fail in either."""
    finite = all(loss is None or math.isfinite(loss) for loss in low.losses)
    return not facts["ends_alike"] and facts["float32_fails"] is None and finite and facts["parts_at"] is not None


def _noise(look: _Look, reference: Outcome, low: Outcome) -> dict[str, Any]:
    """Return how far losses may be off by rounding alone, and that they end alike, if they are no further off."""
    runs = look.noise()
    if runs is None:
        return {}
    noises = [by_rounding(low.dtype, Distance(noise)).loss for noise in _apart(*runs)]
    errors = _apart(reference, low)
    within = len(noises) == len(errors) and all(error <= noise for error, noise in zip(errors, noises, strict=True))
    return {"noise": max(noises), "ends_alike": True} if within else {}


def _apart(reference: Outcome, low: Outcome) -> list[float]:
    """Return of each optimizer how far the losses of a run are from another's, relative to their norm."""
    errors = []
    for curve, other in zip(reference.curves(), low.curves(), strict=False):
        pairs = [pair for pair in zip(curve, other, strict=False) if None not in pair]
        wides, lows = np.array(pairs, np.float64).reshape(-1, 2).T
        errors.append(relative_error(lows, wides))
    return errors


def _modules(
    watched: Trial, name: str, first: ModuleError | None, reference: Outcome, low: Outcome
) -> dict[str, Any] | None:
    """Return how far what modules compute is off in the watched steps; None if none can be watched.

    The first step is of the same weights; the others are of two trainings, which go ways of their own.
    """
    errors = {step: step_errors(reference, low, step, name) for step in watched.watched}
    if not errors[1]:
        return None
    return {
        "first": None if first is None else plain(first),
        "worst_outputs": plain(worst_errors(errors[1], "forward")[:WORST]),
        "worst_gradients": plain(worst_errors(errors[1], "backward")[:WORST]),
        "map": error_map(errors),
    }
