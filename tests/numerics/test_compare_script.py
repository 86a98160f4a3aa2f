"""`ampx compare`: what is said of runs, which are made up here but for one of the toy framework."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

import ampx
from ampx.formats import digits_of
from ampx.numerics import report
from ampx.numerics.compare_script import (
    Sweep,
    _look,
    compare_script,
    ends_alike,
    parse_dtypes,
    parting,
    verdict,
)
from ampx.numerics.meter import Meter, ParameterMeter
from ampx.numerics.probe import Reading, Stats
from ampx.numerics.trial import Outcome, Trial, TrialError
from ampx.run import RunSettings
from ampx.run.program import Program
from ampx.run.recorder import MeterRecord, SampledGradient

SECONDS = {"float32": 0.2, "float16": 0.1, "bfloat16": 0.4}
LAYERS = ("first", "<second>")


def pretended(trial):
    """Stand for a run: float16 is twice as fast and loses its way at step 3, bfloat16 takes twice the time."""
    dtype = trial.settings.dtype
    losses = [1.0, 0.5, 0.25, 0.125]
    if dtype == "float16":
        losses[2:] = [math.inf, math.nan]
    optimizer = {"kind": "SGD", "place": "", "skipped": [3] if dtype == "float16" else [], "scales": []}
    run = {
        "framework": "toy",
        "device": "cpu",
        "dtype": dtype,
        "level": "O1",
        "reason": "made up",
        "steps": 4,
        "optimizers": [{**optimizer, "initial_scale": 8.0}],
        "meters": [metered(dtype).to_json()] if trial.watched else [],
    }
    readings = {
        step: tuple(reading(name, "float32" if step in trial.float32 else dtype, step) for name in LAYERS)
        for step in trial.watched
    }
    memory = {"float32": 2**30}.get(dtype, 2**29)
    return Outcome(run, tuple(losses), (SECONDS[dtype],) * 3, memory, None, readings, watches=True)


def metered(dtype):
    """A meter's record: in bfloat16 three of four updates are lost, else none."""
    lost = 3 if dtype == "bfloat16" else 0
    rows = (ParameterMeter("<w>", "float32", 4, 4, lost, 1, 0, 5.0),)
    return MeterRecord("SGD", [Meter(step, dtype, 8.0, rows) for step in (2, 4)])


def reading(name, dtype, step):
    """A value; in step 3 half of that of <second> overflows in float16, unless casting is off there."""
    overflows = (name, dtype, step) == ("<second>", "float16", 3)
    sample = np.array([1.0, math.inf if overflows else 2.0], np.float32)
    return Reading(name, "Linear", "", "forward", 0, dtype, Stats(2, nonfinite=int(overflows)), sample=sample)


@pytest.fixture
def compared():
    program = Program("<b>.py", False, ("--x",))
    sweep = Sweep.parse("--batch-size=32,64")
    return compare_script(program, RunSettings(), ("float16", "bfloat16"), steps=4, sweep=sweep, run=pretended)


@pytest.mark.parametrize(("steps", "times"), [(3, 1), (4, 3)])
def test_steps_that_are_too_few_to_time_are_told_before_anything_runs_and_run_once(steps, times):
    happened = []

    def run(trial):
        happened.append(trial)
        return pretended(trial)

    def progress(text, left):
        happened.append(text)

    compare_script(Program("train.py"), RunSettings(), ("bfloat16",), steps=steps, run=run, progress=progress)
    warned = f"{steps} steps are too few to time (--steps 4 or more is timed): every dtype runs once …"
    assert (happened[0] == warned) == (times == 1)
    runs = [trial for trial in happened if not isinstance(trial, str) and not trial.watched]
    assert [trial.settings.dtype for trial in runs] == ["float32", "bfloat16"] * times


def test_the_runs_that_are_left_are_counted_down_to_one():
    counted, happened = [], []

    def run(trial):
        happened.append(trial)
        return pretended(trial)

    sweep = Sweep.parse("--batch-size=32,64")
    options = {"steps": 4, "repeats": 2, "sweep": sweep, "progress": lambda text, left: counted.append(left)}
    compare_script(Program("train.py"), RunSettings(), ("bfloat16",), run=run, **options)
    assert counted == list(range(len(happened), 0, -1))
    assert len(happened) == 2 * 2 * 3 + 2


def test_a_sweep_of_steps_that_are_too_few_to_time_is_refused_before_anything_runs():
    sweep = Sweep.parse("--batch-size=32,64")
    with pytest.raises(ampx.InvalidOptionError, match="--sweep --batch-size times steps, and --steps 3 leaves none"):
        compare_script(Program("train.py"), RunSettings(), ("bfloat16",), steps=3, sweep=sweep, run=None)


def test_the_ratio_of_speeds_is_of_pairs_of_runs(compared):
    assert compared["dtypes"]["float16"]["speed"]["ratio"] == 2.0
    assert compared["dtypes"]["bfloat16"]["speed"]["ratio"] == 0.5
    assert compared["dtypes"]["float16"]["memory_ratio"] == 0.5


def test_the_step_and_the_module_where_runs_part_are_named(compared):
    float16, bfloat16 = compared["dtypes"]["float16"], compared["dtypes"]["bfloat16"]
    assert (float16["parts_at"], float16["modules"]["first"]["module"]) == (3, "<second>")
    assert (bfloat16["parts_at"], bfloat16["modules"]["first"]) == (None, None)
    assert float16["losses"] == [1.0, 0.5, "inf", "nan"]
    assert float16["modules"]["first"]["error"] == "inf"
    heat = float16["modules"]["map"]["errors"][1]  # of <second>, by step
    assert heat == [0.0, 0.0, "inf", 0.0]


def test_a_comparison_on_a_cpu_says_what_a_gpu_would_change(compared):
    assert any("Tensor Cores of a GPU" in note for note in compared["notes"])


def test_the_verdict_says_what_fails_and_then_what_it_costs(compared):
    first, *others = compared["dtypes"]["float16"]["verdict"].splitlines()
    assert first.startswith(
        "float16: in step 3, the output of module '<second>' is not finite in float16, though it is "
    )
    assert first.endswith(
        ". The loss first differs from float32's at step 3 of 4 (step 3 skipped), and is not finite in 2 steps: check "
        "this before you rely on it."
    )
    cure, cost = others
    assert cure.startswith("Cure, tried: in bfloat16, at a loss scale of 1: loss 0.25, finite, 0 %")
    assert cost == "2.00 times the speed of float32 (2.00 to 2.00), 0.50 times the memory."
    assert compared["dtypes"]["bfloat16"]["verdict"].splitlines()[0] == (
        "bfloat16: the loss agrees with float32's within rounding in all 4 steps, 75% of the updates are rounded away "
        "(0% in float32): check this before you rely on it."
    )
    assert [compared["dtypes"][name]["doubt"] for name in ("float16", "bfloat16")] == ["fault", "differs"]


FASTER = "1.50 times the speed of float32 (1.40 to 1.60)"
AGREES = "the loss agrees with float32's within rounding in all 4 steps"
CHECK = "check this before you rely on it."
DIFFERS = "loss first differs from float32's"
FAULT = {"step": 2, "kind": "overflow", "why": "it is.", "by_hand": False, "cure": None}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, [f"float16: {AGREES}.", f"{FASTER}: worth it."]),
        (
            {"speed": {"ratio": 1.5, "least": 0.9, "largest": 1.6, "pairs": [0.9, 1.5, 1.6]}},
            ["more --repeats on a quiet machine decide whether it is worth it."],
        ),
        (
            {"speed": {"ratio": 1.0, "least": 0.99, "largest": 1.1, "pairs": [0.99, 1.0, 1.1]}},
            ["no gain on this machine."],
        ),
        (
            {"losses": [1.0, 2.0, 3.0, 4.0], "parts_at": 2, "float32_parts_at": 1, "ends_alike": False},
            [
                "two runs in float32 differ from each other at step 1, so losses cannot be compared: make the script "
                "repeatable first.",
                f"{FASTER}.",
            ],
        ),
        (
            {"float32_fails": "float32 itself fails: its loss is not finite at step 3", "parts_at": 2},
            [
                "float32 itself fails: its loss is not finite at step 3: mend that first, for precision is not the "
                "cause.",
                f"{FASTER}.",
            ],
        ),
        (
            {"settled": {"scale": 128.0, "skipped": []}, "skipped": [1, 2, 3]},
            [f"{AGREES} at a loss scale of 128.", "worth it."],
        ),
        (
            {"flushed": ["small.weight"]},
            [f"{AGREES}, gradients of small.weight underflow to zero: {CHECK}", f"{FASTER}."],
        ),
        (
            {"parts_at": 2, "ends_alike": False, "modules": {"first": {"module": "2", "direction": "backward"}}},
            [f"at step 2 of 4, and still differs at the end: {CHECK}", "."],
        ),
        (
            {"speed": {"ratio": 0.5, "least": 0.5, "largest": 0.5, "pairs": [0.5]}, "memory_ratio": 1.25},
            [f"{AGREES}.", "(one pair of runs), 1.25 times the memory: not worth it on this machine."],
        ),
        (
            {"speed": {"ratio": 1.3, "least": 1.3, "largest": 1.3, "pairs": [1.3]}},
            ["more --repeats on a quiet machine decide whether it is worth it."],
        ),
        ({"speed": {"ratio": 1.6, "least": 1.6, "largest": 1.6, "pairs": [1.6]}}, ["worth it."]),
        (
            {"speed": None},
            [
                f"{AGREES}.",
                "4 steps are too few to time: more steps, by --steps or by the script, decide whether it is worth it.",
            ],
        ),
        (
            {"speed": None, "steps": 1},
            ["1 step is too few to time: more steps, by --steps or by the script, decide whether it is worth it."],
        ),
        ({"skipped": [1, 2, 3, 4]}, [f"4 of 4 steps were skipped: {CHECK}", f"{FASTER}."]),
        (
            {"losses": [1.0, "nan", "nan", "nan"], "parts_at": 2, "ends_alike": False},
            [
                f"the loss first differs from float32's at step 2 of 4, and is not finite in 3 steps: {CHECK}",
                f"{FASTER}.",
            ],
        ),
        (
            {"losses": [1.0, 2.0, 3.0, 4.0], "parts_at": 2, "ends_alike": False},
            [f"at step 2 of 4, and still differs at the end: {CHECK}", f"{FASTER}."],
        ),
        ({"losses": [1.0, 2.0, 3.0, 4.0], "parts_at": 2}, ["at step 2 of 4, and agrees at the end.", "worth it."]),
        (
            {"losses": [1.0, 2.0, 3.0, 4.0], "parts_at": 2, "noise": 0.08},
            ["and stays within the rounding noise of the script.", "worth it."],
        ),
        (
            {"losses": [1.0, 2.0, 3.0, 4.0], "parts_at": 2, "fault": FAULT},
            [f"float16: in step 2, it is. The {DIFFERS} at step 2 of 4, and agrees at the end: {CHECK}", f"{FASTER}."],
        ),
        (
            {"fault": {**FAULT, "cure": "with 'x' in float32: loss 1"}},
            [f"in step 2, it is. T{AGREES[1:]}: {CHECK}", "Cure, tried: with 'x' in float32: loss 1.", f"{FASTER}."],
        ),
        (
            {"fault": {**FAULT, "by_hand": True}},
            [
                "in step 2, it is. The loss agrees with float32's within rounding in all 4 steps, but float32 itself "
                f"overflows where the script casts by hand: {CHECK}",
                f"{FASTER}.",
            ],
        ),
        (
            {"lost": {"float32": 0.9, "dtype": 0.9}},
            ["in all 4 steps, 90% of the updates are rounded away (90% in float32).", "worth it."],
        ),
        (
            {"mistakes": ["a.py:3: most updates round to nothing."]},
            [f"{AGREES}: {CHECK} a.py:3: most updates round to nothing.", f"{FASTER}."],
        ),
        ({"losses": [None] * 4, "ends_alike": False}, [f"the losses are not known: {CHECK}", f"{FASTER}."]),
    ],
)
def test_the_verdict_is_true_of_what_was_seen(change, lines):
    speed = {"ratio": 1.5, "least": 1.4, "largest": 1.6, "pairs": [1.4, 1.5, 1.6]}
    facts = {"speed": speed, "memory_ratio": None, "losses": [1.0] * 4, "parts_at": None, "ends_alike": True}
    facts |= {"skipped": [], "steps": 4, "modules": None, "lost": {"float32": 0.0, "dtype": 0.0}}
    facts |= {
        **dict.fromkeys(("float32_parts_at", "float32_fails", "settled", "fault", "noise")),
        "flushed": [],
        "rounded": [],
        "mistakes": [],
    }
    said = verdict("float16", {**facts, **change}).splitlines()[-len(lines) :]
    for line, end in zip(said, lines, strict=True):
        assert line.endswith(end)


def sampled(name, values, dtype="float16"):
    value = np.array(values, np.float32)
    return Reading(name, "Linear", "", "forward", 0, dtype, Stats(2, largest=float(value.max())), sample=value)


def lossy(trial):
    """Stand for a run whose loss in float16 is wrong by half in step 3, with `out`, for what `pos` has rounded away."""
    outcome = pretended(trial)
    rounds = {None: trial.settings.dtype == "float16", "float32": False, digits_of(11): True}
    low = rounds[trial.forced.get("pos")]
    optimizers = [{**optimizer, "skipped": []} for optimizer in outcome.run["optimizers"]]
    values = {
        step: (
            sampled("pos", [0.999, 0.998], "float16" if low else "float32"),
            sampled("out", [1.0, 3.0 if low and step == 3 and 3 not in trial.float32 else 2.0]),
        )
        for step in trial.watched
    }
    losses = [1.0, 0.5, 0.375 if low else 0.25, 0.125]
    return replace(outcome, losses=tuple(losses), run={**outcome.run, "optimizers": optimizers}, readings=values)


def test_the_module_that_lost_the_digits_is_named_and_not_the_one_that_misses_them():
    """A sigmoid that is rounded to 1 is within rounding of what it is, and the logarithm behind it is elsewhere."""
    result = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=lossy)
    facts = result["dtypes"]["float16"]
    assert (facts["parts_at"], facts["modules"]["first"]["module"], facts["fault"]["kind"]) == (3, "pos", "digits")
    first, cure, _ = facts["verdict"].splitlines()
    assert first.startswith("float16: in step 3, the output of module 'pos' loses precision in float16 that is needed ")
    assert first.endswith(" step 3 of 4, and agrees at the end: check this before you rely on it.")
    assert cure == (
        "Cure, tried: with module 'pos' in float32, at a loss scale of 8: loss 0.25, finite, 0 % from float32's."
    )
    assert list(facts["fault"]["deny"]) == ["module:pos"]
    assert "deny=['module:pos']" in facts["fault"]["advice"]


def test_the_step_that_is_diagnosed_is_the_first_whose_loss_is_wrong_and_not_the_first_that_differs():
    def run(trial):
        outcome = lossy(trial)
        first, second, *others = outcome.losses
        return replace(outcome, losses=(first, 1.006 * second if others[0] == 0.375 else second, *others))

    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    assert (facts["parts_at"], facts["fault"]["step"]) == (2, 3)


def elsewhere(noise, loss=0.125 * 1.03):
    """Return what stands for runs that end elsewhere in float16, and by so much elsewhere where float32 is rounded."""

    def run(trial):
        outcome = pretended(trial)
        rounded = {digits_of(11): 1.0, digits_of(10): 1 + noise}.get(trial.forced.get("*"))
        last = 0.125 * rounded if rounded else loss if trial.settings.dtype == "float16" else 0.125
        optimizers = [{**optimizer, "skipped": []} for optimizer in outcome.run["optimizers"]]
        readings = {step: (sampled("out", [1.0, 2.0]),) for step in trial.watched}
        losses = (0.0, 0.0, 0.0, last)
        return replace(outcome, losses=losses, run={**outcome.run, "optimizers": optimizers}, readings=readings)

    return run


@pytest.mark.parametrize(
    ("noise", "loss", "end"),
    [
        (0.01, 0.125 * 1.03, "stays within the rounding noise of the script"),
        (0.003, 0.125 * 1.03, "still differs at the end"),
        (0.01, math.inf, "is not finite in 1 step"),
    ],
)
def test_a_training_ends_elsewhere_where_it_differs_by_more_than_its_own_noise(noise, loss, end):
    """Of the losses 3 % are more than eight roundings of float16, and less than eight times a noise of 1 %."""
    run = elsewhere(noise, loss)
    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    assert (facts["parts_at"], facts["modules"]["first"]) == (4, None)
    assert re.search(rf"at step 4 of 4, and {end}[.:]", facts["verdict"])
    assert facts["noise"] == (pytest.approx(0.08) if noise == 0.01 and loss < 1 else None)


def test_rounded_runs_that_fail_are_not_made_again():
    """They are asked for where the step is chosen, and where the end is judged."""
    forced = []

    def run(trial):
        if trial.forced:
            forced.append(trial.forced["*"])
            raise TrialError("a module does not take what is rounded")
        return elsewhere(0.01)(trial)

    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    assert (forced, facts["noise"]) == ([digits_of(11)], None)


def test_what_the_script_itself_casts_and_overflows_is_named_though_losses_agree():
    def run(trial):
        lost = Stats(4, nonfinite=4)
        squares = Reading("hand", "Distance", "square", "forward", 0, "float16", lost, Stats(4, largest=300.0))
        output = sampled("hand", [0.0, 0.0])
        taken = {step: (*readings[:1], squares, output) for step, readings in pretended(trial).readings.items()}
        return replace(pretended(trial), losses=(1.0, 0.5, 0.25, 0.125), readings=taken)

    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    assert (facts["fault"]["by_hand"], facts["fault"]["kind"], facts["modules"]["first"]) == (True, "overflow", None)
    assert facts["fault"]["place"]["operation"] == "square"
    assert (
        "float32 itself overflows where the script casts by hand: check this before you rely on it." in facts["verdict"]
    )


@pytest.mark.parametrize(("number", "module"), [(1.5, None), (math.inf, "<second>")])
def test_where_float32_cannot_go_on_from_what_low_precision_has_left_only_what_is_not_finite_is_named(number, module):
    """A pool of pictures in float16, say, which are the next step's inputs."""

    def run(trial):
        if trial.float32:
            raise TrialError("mat1 and mat2 must have the same dtype")
        outcome = pretended(trial)
        if trial.settings.dtype != "float16" or 3 not in trial.watched:
            return outcome
        first, second = outcome.readings[3]
        value = Stats(2, nonfinite=int(math.isinf(number)))
        other = replace(second, value=value, sample=np.array([1.0, number], np.float32))
        return replace(outcome, readings={**outcome.readings, 3: (first, other)})

    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    first = facts["modules"]["first"]
    assert (facts["parts_at"], first and first["module"]) == (3, module)
    assert (f"float16: in step 3, the output of module {module!r} is not finite" in facts["verdict"]) == bool(module)
    assert "at step 3 of 4 (step 3 skipped), and is not finite in 2 steps" in facts["verdict"]


def test_gradients_that_flush_to_zero_are_named_though_the_losses_agree():
    """Of two losses of one trunk the larger one hides what becomes of the smaller one."""

    def run(trial):
        flushes = trial.settings.dtype == "float16"
        gradients = (SampledGradient("small", (16,), np.full(16, 0.0 if flushes else 1e-9, np.float32)),)
        gradients += (SampledGradient("large", (16,), np.ones(16, np.float32)),)
        taken = dict.fromkeys(trial.gradients, gradients)
        return replace(pretended(trial), losses=(1.0, 0.5, 0.25, 0.1), gradients=taken)

    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    assert (facts["parts_at"], facts["flushed"]) == (None, ["small"])


@pytest.mark.parametrize("skips_again", [False, True])
def test_steps_skipped_until_the_loss_scale_settles_are_no_matter_of_precision(skips_again):
    """Each skipped step puts the training back by one: at a quarter of the last scale, it trains as float32."""
    ran = []

    def run(trial):
        ran.append(trial)
        outcome, scale = pretended(trial), trial.settings.loss_scale
        settles = trial.settings.dtype == "float16" and (scale is None or skips_again)
        optimizer = {**outcome.run["optimizers"][0], "skipped": [], "initial_scale": scale or 8.0}
        optimizer |= {"skipped": [1, 2], "initial_scale": 64.0, "scales": [(1, 32.0), (2, 16.0)]} if settles else {}
        losses = (1.0, 1.0, 1.0, 0.5) if settles else (1.0, 0.5, 0.25, 0.125)
        return replace(outcome, run={**outcome.run, "optimizers": [optimizer]}, losses=losses)

    result = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, repeats=1, run=run)
    facts = result["dtypes"]["float16"]
    assert facts["skipped"] == [1, 2]
    settled = (None, 2) if skips_again else ({"scale": 4.0, "skipped": []}, None)
    assert (facts["settled"], facts["parts_at"]) == settled
    whole = [trial for trial in ran if 1 in trial.watched]  # what a diagnosis of step 2 tries is watched there only
    assert {trial.settings.loss_scale for trial in whole} == ({None} if skips_again else {None, 4.0})


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((1.0, 2.0, math.nan, 1.0), "float32 itself fails: its loss is not finite at step 3"),
        ((0.5, 0.6, 5.0, 70.0), "float32 itself diverges: its loss goes from 0.5 to 70"),
        ((1.0, 2.0, 4.0, math.inf), "float32 itself fails: its loss is not finite at step 4"),
        ((0.5, 70.0, 5.0, 0.4), None),
        ((0.09, 5.0, -0.5, -1.3), None),  # a critic's loss that falls below zero
    ],
)
def test_what_fails_in_float32_itself_is_no_matter_of_precision(losses, words):
    def run(trial):
        return replace(pretended(trial), losses=losses)

    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    assert facts["float32_fails"] == words
    assert (words or "the loss agrees") in facts["verdict"]


@pytest.mark.parametrize(("skipped", "step"), [((), 2), ((1,), 1), ((3,), 2), ((1, 2), 2)])
def test_a_loss_that_differs_behind_a_skipped_step_differs_because_of_that(skipped, step):
    """As that of a generator, whose critic was not trained."""
    reference = replace(pretended(Trial(Program("a.py"), RunSettings("float32"))), losses=(1.0, 0.5, 0.25, 0.125))
    optimizer = {**reference.run["optimizers"][0], "skipped": [*skipped]}
    low = replace(
        reference, run={**reference.run, "optimizers": [optimizer], "dtype": "float16"}, losses=(1.0, 5.0, 5.0, 5.0)
    )
    assert _look({"parts_at": 2}, reference, low, lambda: None).step == step


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_steps_that_float32_skips_are_no_matter_of_precision(loss):
    """Its gradients are not finite, though the loss may be, in every step the same."""

    def run(trial):
        outcome = replace(pretended(trial), losses=(1.0, 1.0, loss, loss))
        skipped = [2, 3, 4] if trial.settings.dtype == "float32" else []
        optimizer = {**outcome.run["optimizers"][0], "skipped": skipped}
        return replace(outcome, run={**outcome.run, "optimizers": [optimizer]})

    facts = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)["dtypes"]["float16"]
    assert facts["float32_fails"] == "float32 itself fails: its gradients are not finite at step 2"


def test_the_losses_of_two_optimizers_both_have_to_end_alike():
    """In adversarial training the larger loss hides what became of the smaller one."""

    def two(trial):
        small = 0.1 if trial.settings.dtype == "float32" else 0.2
        return replace(pretended(trial), losses=(9.0, small) * 4, losses_of=("D", "G") * 4)

    result = compare_script(Program("gan.py"), RunSettings(), ("float16",), steps=4, run=two)
    assert ends_alike((9.0, 0.1) * 4, (9.0, 0.2) * 4, "float16")  # as one curve
    assert not result["dtypes"]["float16"]["ends_alike"]


def test_steps_that_nothing_warmed_up_are_not_timed():
    result = compare_script(Program("a.py"), RunSettings(), ("float16",), steps=3, run=pretended)
    assert (result["float32"]["steps_a_second"], result["dtypes"]["float16"]["speed"]) == (None, None)


def test_the_meter_of_each_dtype_is_told(compared):
    assert [row[:4] for row in report.meter_rows(compared)] == [
        ("float32", "0.00%", "25.00%", "5.0 bits"),
        ("float16", "0.00%", "25.00%", "5.0 bits"),
        ("bfloat16", "75.00%", "25.00%", "5.0 bits"),
    ]
    assert report.meter_rows(compared)[2][4] == "<w>: 75%"
    compared["float32"]["meters"] *= 2
    assert [row[0] for row in report.meter_rows(compared)][:3] == ["float32, SGD 1", "float32, SGD 2", "float16"]


@pytest.mark.parametrize(("repeats", "watches"), [(2, False), (1, True)])
def test_precision_is_not_blamed_where_runs_in_float32_part_from_each_other(repeats, watches):
    runs = []

    def drawn_anew(trial):
        runs.append(trial)
        losses = tuple(loss * len(runs) for loss in (1.0, 0.5, 0.25, 0.125))
        return replace(pretended(trial), losses=losses, watches=watches)

    program = Program("a.py")
    result = compare_script(program, RunSettings(), ("bfloat16",), steps=4, repeats=repeats, run=drawn_anew)
    facts = result["dtypes"]["bfloat16"]
    assert (facts["parts_at"], facts["float32_parts_at"], facts["modules"]) == (1, 1, None)
    assert result["notes"][0].startswith("Two runs of a.py in float32 have different losses: ")


def test_a_dtype_that_fails_leaves_the_others_their_answer():
    def run(trial):
        if trial.settings.dtype == "float16" or trial.program.arguments == ("--n=2",):
            raise TrialError("out of memory")
        return pretended(trial)

    sweep = Sweep.parse("--n=1,2")
    result = compare_script(Program("a.py"), RunSettings(), ("float16", "bfloat16"), steps=4, sweep=sweep, run=run)
    assert result["failed"] == {"float16": "out of memory"}
    assert list(result["dtypes"]) == ["bfloat16"]
    assert list(result["sweep"]["points"][0]["runs"]) == ["float32", "bfloat16"]
    assert report.sweep_failures(result["sweep"]) == ["With --n 2 float32 failed: out of memory"]
    with pytest.raises(TrialError, match="out of memory"):
        compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=run)
    assert [row[2] for row in report.compared_rows(result)] == ["–", "0.50× (0.50–0.50)"]
    result = compare_script(Program("a.py"), RunSettings(), ("bfloat16",), steps=4, repeats=1, run=pretended)
    assert report.compared_rows(result)[1][2] == "0.50×"  # one pair has no spread


def test_that_auto_chooses_float32_is_an_answer_of_one_run():
    asked = []

    def on_an_old_cpu(trial):
        asked.append(trial.settings.dtype)
        outcome = pretended(replace(trial, settings=replace(trial.settings, dtype="float32")))
        return replace(outcome, run={**outcome.run, "reason": "no instructions"})

    report = compare_script(Program("a.py"), RunSettings(), ("auto",), steps=4, run=on_an_old_cpu)
    assert asked == ["auto"]
    assert (report["dtypes"], report["repeats"]) == ({}, 1)
    assert report["verdict"].startswith("Nothing was compared, since `auto` is float32 on this machine: no instr")
    with pytest.raises(TrialError, match="float16"):
        compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=on_an_old_cpu)


@pytest.mark.parametrize(
    ("native", "asked_for", "compared"),
    [(("bfloat16",), ("auto",), ["bfloat16"]), ((), ("auto", "float16"), ["float16"])],
)
def test_where_auto_is_float32_what_the_hardware_has_or_was_named_is_compared(native, asked_for, compared):
    def careful(trial):
        if trial.settings.dtype == "auto":
            trial = replace(trial, settings=replace(trial.settings, dtype="float32"))
        return replace(pretended(trial), native=native)

    report = compare_script(Program("a.py"), RunSettings(), asked_for, steps=4, run=careful)
    assert (list(report["dtypes"]), report["repeats"]) == (compared, 3)


def test_a_script_of_the_toy_framework_is_compared(toy_script):
    program = toy_script(
        """
        from toy import framework as toy
        weight = toy.Tensor([0.5, 0.25], parameter=True)
        optimizer = toy.Optimizer([weight], lr=0.0001)
        for step in range(100):
            toy.total(toy.product(weight, toy.Tensor([0.1, 0.3]))).backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    result = compare_script(program, RunSettings(), ("bfloat16",), framework="toy", steps=8, repeats=1)
    assert (result["steps"], result["framework"]) == (8, "toy")
    assert result["float32"]["losses"][0] == pytest.approx(0.125)
    assert result["dtypes"]["bfloat16"]["parts_at"] is None
    assert result["dtypes"]["bfloat16"]["losses"] != result["float32"]["losses"]


@pytest.mark.parametrize(
    ("losses", "step"),
    [([1.0, 1.01], None), ([1.0, 1.1], 2), ([math.nan, 1.0], 1), ([None, 1.0], None), ([1.0, None], None)],
)
def test_losses_part_where_rounding_does_not_explain_the_difference(losses, step):
    assert parting([1.0, 1.0], losses, "bfloat16") == step


def test_trainings_end_alike_within_the_spread_of_the_reference():
    noisy = [1.0, 2.0] * 8
    assert ends_alike(noisy, [value + 0.3 for value in noisy], "float16")
    assert not ends_alike([1.0] * 16, [1.3] * 16, "float16")
    assert not ends_alike([1.0] * 16, [math.nan] * 16, "float16")


def test_a_sweep_is_an_option_and_its_values():
    program = Program("a.py", False, ("x",))
    assert Sweep.parse("--n=1,2").program(program, "2").arguments == ("x", "--n=2")
    assert Sweep.parse("--n 1,2").program(program, "2").arguments == ("x", "--n", "2")
    for wrong in ("--n", "--n=1", "=1,2", ""):
        with pytest.raises(ampx.InvalidOptionError, match="--sweep"):
            Sweep.parse(wrong)


def test_dtypes_are_names_with_commas():
    assert parse_dtypes("fp16, bf16,float16") == ("float16", "bfloat16")
    for wrong in ("float32", "", "int8"):
        with pytest.raises(ampx.InvalidOptionError):
            parse_dtypes(wrong)
    with pytest.raises(ampx.UnsupportedDtypeError, match=r"--dtype.*ampx tune --what-if float8_e4m3"):
        parse_dtypes("float16,fp8_e4m3")
