"""`ampx diagnose` of a script of the toy framework: the step, the place, and whether precision is to blame."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import ampx
from ampx.formats import digits_of
from ampx.modules import owner_of
from ampx.numerics import report
from ampx.numerics.batch import Seen
from ampx.numerics.causes import find_fault
from ampx.numerics.compare_script import compare_script
from ampx.numerics.diagnose_script import (
    Parting,
    _diverges_after,
    _fails_after,
    _growth,
    diagnose_script,
    rates_part,
)
from ampx.numerics.places import first_failing, of_the_step
from ampx.numerics.probe import Reading, Replayed, Stats
from ampx.numerics.trial import Outcome
from ampx.run import RunSettings
from ampx.run.program import Program

SCRIPT = """
from toy import framework as toy
weight = toy.Tensor([0.5, 0.25], parameter=True)
optimizer = toy.Optimizer([weight], lr=0.001)
for step in range(6):
    data = toy.Tensor([FACTOR, 1.0])
    toy.total(toy.product(weight, data)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def diagnosed(toy_script):
    """Return a function that diagnoses a script whose data has such a factor."""

    def run(factor, **options):
        program = toy_script(SCRIPT.replace("FACTOR", factor))
        return diagnose_script(program, RunSettings("float16", loss_scale=1.0), framework="toy", **options)

    return run


def test_a_value_beyond_float16_is_found_in_its_step_and_float32_is_innocent(diagnosed, tmp_path):
    diagnosis, result = diagnosed("7e4 if step == 3 else 1.0")
    assert (result["step"], result["fault"]) == (4, "loss")
    assert diagnosis.kind == "overflow"
    assert not diagnosis.float32_fails
    assert result["verdict"].startswith("In step 4, the output of product is not finite in float16, ")
    report.write(tmp_path / "out.json", result)
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == "ampx.diagnose/1"


RAISES = """
from toy import framework as toy
weight = toy.Tensor([0.5, 0.25], parameter=True)
optimizer = toy.Optimizer([weight], lr=0.001)
for step in range(6):
    scores = toy.product(weight, toy.Tensor([FACTOR, 1.0]))
    if CONDITION:
        raise ValueError(f"{scores.dtype} is\\nno good")
    toy.total(scores).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def raising(toy_script, condition, factor="1.0"):
    program = toy_script(RAISES.replace("CONDITION", condition).replace("FACTOR", factor))
    return diagnose_script(program, RunSettings("float16", loss_scale=1.0), framework="toy")


@pytest.mark.parametrize("step", [0, 3])
def test_what_raises_in_low_precision_only_is_named_with_its_line_and_the_place_it_did_not_come_to(toy_script, step):
    diagnosis, result = raising(toy_script, f"step == {step} and scores.dtype == 'float16'")
    assert (result["step"], result["fault"], diagnosis.kind) == (step + 1, "exception", "error")
    assert "train.py:8) cannot be computed in float16, only in float32: ValueError: float16 is." in diagnosis.why
    assert not diagnosis.precision_is_innocent
    assert diagnosis.advice.startswith("with ampx.autocast(enabled=False)")


def test_a_script_that_raises_because_of_what_is_not_finite_is_told_where_that_comes_from(toy_script):
    diagnosis, result = raising(toy_script, "scores.data[0] == float('inf')", "7e5 if step == 2 else 1.0")
    assert (result["step"], result["fault"], diagnosis.kind) == (3, "exception", "overflow")


def test_a_script_that_raises_in_float32_too_is_an_error_that_says_so(toy_script):
    with pytest.raises(ampx.TrialError, match=r"after 2 steps in float32, too: ValueError: float32 is in .*py:8"):
        raising(toy_script, "step == 2")


def test_what_ampx_refuses_is_no_failure_of_the_script_in_float32(toy_script):
    """An optimizer of weights in bfloat16, say, whose updates are lost."""
    refuses = 'import ampx\n        raise ampx.LowPrecisionParametersError("updates are lost")'
    script = re.sub(r"raise ValueError.*", refuses, RAISES.replace("CONDITION", "step == 2").replace("FACTOR", "1.0"))
    with pytest.raises(ampx.TrialError, match=r"^train.py in float16 was refused: .*train.py:9: updates are lost$"):
        diagnose_script(toy_script(script), RunSettings("float16", loss_scale=1.0), framework="toy")


@pytest.mark.parametrize(("condition", "step"), [("step > 2", 6), ("step > 3", None)])
def test_a_script_half_of_whose_steps_are_skipped_is_not_called_sound(toy_script, condition, step):
    program = toy_script(SCRIPT.replace("FACTOR", f"6e4 if {condition} else 1.0"))
    diagnosis, result = diagnose_script(program, RunSettings("float16", loss_scale=8.0), framework="toy")
    assert (result["step"], result["fault"]) == (step, "skipped" if step else None)
    assert (diagnosis is None) == (step is None)


def test_data_that_is_not_finite_is_no_matter_of_precision(diagnosed):
    diagnosis, result = diagnosed("float('nan') if step == 1 else 1.0")
    assert result["step"] == 2
    assert diagnosis.float32_fails
    assert diagnosis.precision_is_innocent


def test_a_script_that_does_not_fail_is_accused_of_nothing(diagnosed):
    diagnosis, result = diagnosed("1.0")
    assert diagnosis is None
    assert result["verdict"].startswith("Nothing failed in 6 steps in float16: the losses are finite, 0 steps were")
    assert (result["looked_at"], result["risks"]) == (6, [])


@pytest.mark.parametrize(("watches", "words"), [(True, "could be watched"), (False, None)])
def test_a_script_that_does_not_fail_and_cannot_be_watched_is_no_error(watches, words):
    report = {"framework": "x", "device": "cpu", "dtype": "float16", "level": "O1", "reason": "asked for", "steps": 3}
    report |= {"optimizers": [], "notes": []}
    outcome = Outcome(run=report, losses=(1.0, 1.0, 1.0), watches=watches, readings={3: ()})
    diagnosis, result = diagnose_script(Program("train.py"), RunSettings("float16"), run=lambda trial: outcome)
    assert (diagnosis, result["looked_at"], result["risks"]) == (None, None, [])
    assert [words in note for note in result["notes"]] == ([True] if words else [])


def test_a_step_that_was_asked_for_and_is_healthy_is_called_so(diagnosed):
    diagnosis, result = diagnosed("1.0", at=2)
    assert (diagnosis.kind, result["fault"]) == ("healthy", "asked for")


def test_a_step_that_the_script_does_not_make_is_an_error(diagnosed):
    with pytest.raises(ampx.TrialError, match="did not come to step 9"):
        diagnosed("1.0", at=9)


def fails_in_float32(*readings):
    run = Seen(Replayed(math.nan, {}, {}), readings, skipped=True)
    return find_fault(run, run, "float32", 1.0)


def test_what_is_not_finite_comes_with_the_batch_or_else_it_is_the_weights():
    def read(operation, inputs, module="head", kind="Linear", value=None):
        value = value or Stats(4, nonfinite=4, nan=4)
        return Reading(module, kind, operation, "forward", 0, "float32", value, inputs)

    sound, bad = Stats(8, largest=2.0), Stats(8, nonfinite=1, nan=1)
    product = read("linear", Stats(24, nonfinite=3, nan=3))
    assert fails_in_float32(product, read("", sound, ""), read("", sound)).kind == "weights"
    assert fails_in_float32(product, read("", bad), read("", bad, "")).kind == "data"
    loss = read("square", bad, "", "")  # outside of all modules, of targets, say
    model = read("", sound, "", value=sound)
    assert fails_in_float32(model, loss).kind == "data"
    assert fails_in_float32(product).kind == "data"  # no model is known


def test_what_a_module_computed_of_data_that_is_not_finite_is_no_parameter():
    """A residual adds its input to what came of it, and a square receives it twice: each NaN counts again."""

    def read(module, operation, value, inputs):
        nan = [Stats(elements, nonfinite=bad, nan=bad) for elements, bad in (value, inputs)]
        return Reading(module, "Module", operation, "forward", 0, "float32", *nan)

    readings = [
        read("block.square", "mul", (8, 1), (16, 2)),
        read("block.square", "", (8, 1), (8, 1)),
        read("block", "add", (8, 1), (16, 2)),
        read("block", "mul", (8, 1), (24, 5)),
        read("block", "", (8, 1), (8, 1)),
        read("", "", (8, 1), (8, 1)),
    ]
    assert fails_in_float32(*readings).kind == "data"


def test_what_initializers_and_optimizers_compute_is_no_part_of_the_step():
    def read(operation, kind="", direction="forward"):
        return Reading("", kind, operation, direction, 0, "float32", Stats(4), Stats(4))

    step = [read("mm", "Net"), read("", "Net"), read("square"), read("mm", "Net", "backward")]
    assert of_the_step([read("uniform_"), *step, read("addcdiv_")]) == tuple(step)
    assert of_the_step([read("square"), read("log")]) == (read("square"), read("log"))  # no module computes


def test_a_batch_that_the_script_itself_prepares_is_part_of_the_step_where_it_is_not_finite():
    def read(operation, nan, received, kind=""):
        stats = [Stats(96, nonfinite=count, nan=count, largest=2.0) for count in (nan, received)]
        return Reading("", kind, operation, "forward", 0, "float32", *stats)

    product = read("MatMul", 96, 16, "Forecast")
    step = (read("RealDiv", 16, 0), read("Cast", 16, 16), product, read("", 96, 16, "Forecast"))
    assert of_the_step([read("uniform", 0, 0), read("Sub", 0, 0), *step]) == step
    division = fails_in_float32(*of_the_step([read("Sub", 0, 0), *step]))
    assert (division.kind, division.place.operation) == ("division", "RealDiv")
    batch = fails_in_float32(*of_the_step(step[1:]))
    assert (batch.kind, batch.place.operation) == ("data", "MatMul")  # no operation made it

    sound = (read("MatMul", 0, 0, "Forecast"), read("", 0, 0, "Forecast"), read("log", 96, 0))
    assert of_the_step([read("RealDiv", 1, 0), *sound]) == sound  # of a metric, say


def test_an_infinity_that_becomes_a_finite_number_is_no_failure():
    """The scores of a causal attention have one, whether a mask is filled in or added."""

    def read(operation, nonfinite, received, nan=0):
        values = Stats(16, nonfinite=nonfinite, nan=nan), Stats(32, nonfinite=received)
        return Reading("attention", "Attention", operation, "forward", 0, "float32", *values)

    causal = [read("scalar_tensor", 1, 0), read("add", 6, 6), read("softmax", 0, 6)]
    assert first_failing([*causal, read("mm", 3, 0)], None) == 3
    assert first_failing([read("exp", 2, 0), read("div", 2, 4, nan=2), read("where", 0, 2)], None) == 0
    assert first_failing(causal[:2], None) == 1


def test_a_variable_that_is_read_and_is_not_finite_is_a_weight():
    def read(module, kind, operation, value, inputs=None):
        return Reading(module, kind, operation, "forward", 0, "float32", value, inputs or Stats())

    readings = (
        read("head", "Dense", "ReadVariableOp", Stats(8, nonfinite=1, nan=1)),
        read("head", "Dense", "MatMul", Stats(4, nonfinite=4, nan=4), Stats(12, nonfinite=1, nan=1)),
        read("", "Net", "", Stats(4, nonfinite=4, nan=4), Stats(4)),
    )
    assert fails_in_float32(*readings).kind == "weights"


@pytest.mark.parametrize(("skipped", "words"), [([], "0 steps were skipped,"), ([2], "1 step was skipped (--at 2 ")])
def test_where_no_loss_was_reported_none_is_called_finite(skipped, words):
    optimizer = {"skipped": skipped, "scales": [], "initial_scale": 1.0}
    facts = {"framework": "toy", "device": "cpu", "level": "O1", "dtype": "float16", "steps": 3}
    outcome = Outcome({**facts, "reason": "", "optimizers": [optimizer]}, losses=(None,) * 3)
    _, report = diagnose_script(Program("train.py"), RunSettings(), run=lambda trial: outcome)
    assert f"no loss was seen, {words}" in report["verdict"]


def test_a_step_in_which_nothing_ran_in_python_is_not_called_healthy():
    outcome = Outcome({"dtype": "float16", "steps": 3, "notes": []}, readings={3: ()}, watches=True)
    with pytest.raises(ampx.TrialError, match="nothing in it could be watched"):
        diagnose_script(Program("train.py"), RunSettings(), at=3, run=lambda trial: outcome)


def run_of_toy(toy_script, dtype, condition="True", factor="1.0"):
    """Return what `ampx run` prints of a script that raises in its first step."""
    program = toy_script(RAISES.replace("FACTOR", factor).replace("CONDITION", condition))
    command = (sys.executable, "-m", "ampx", "run", "--framework", "toy", "--dtype", dtype, program.name, "a b")
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_that_failed_in_low_precision_names_the_command_that_says_whether_that_is_why(toy_script):
    done = run_of_toy(toy_script, "float16")
    (line,) = (line for line in done.stderr.splitlines() if "ampx diagnose" in line)
    assert done.returncode == 1
    assert "failed      by ValueError; whether float16 is why" in line
    assert line.endswith("ampx diagnose --dtype float16 --framework toy train.py 'a b'")


@pytest.mark.parametrize(("dtype", "condition"), [("float32", "True"), ("float16", "False")])
def test_a_run_that_did_not_fail_or_not_in_low_precision_names_no_diagnosis(toy_script, dtype, condition):
    assert "ampx diagnose" not in run_of_toy(toy_script, dtype, condition).stderr


def test_gradients_of_a_step_with_casting_off_are_unscaled_before_they_are_compared():
    """In that step the loss is scaled as in those around it."""

    def run(trial):
        dtype, times = ("float32", 1.0) if trial.settings.dtype == "float32" else ("float16", 1024.0)
        optimizer = {"kind": "SGD", "place": "", "skipped": [], "scales": [], "initial_scale": times}
        facts = {"framework": "toy", "device": "cpu", "level": "O1", "reason": "", "meters": [], "notes": []}
        value = Stats(2, largest=0.5 * times, smallest=0.25 * times, lowest=0.25 * times)
        sample = np.array([0.25, 0.5], np.float32) * np.float32(times)
        gradient = Reading("layer", "Linear", "", "backward", 0, dtype, value, sample=sample)
        readings = {step: (gradient,) for step in trial.watched}
        run = {**facts, "dtype": dtype, "steps": 4, "optimizers": [optimizer]}
        return Outcome(run, (1.0,) * 4, readings=readings, watches=True)

    options = {"framework": "toy", "at": 3, "run": run}
    _, result = diagnose_script(Program("a.py"), RunSettings("float16", loss_scale=1024.0), **options)
    (gradient,) = result["modules"]
    assert (gradient["value"]["largest"], gradient["float32"]["largest"]) == (512.0, 0.5)


@pytest.mark.parametrize("order", ["before", "behind"])
@pytest.mark.parametrize("carries", [True, False])
def test_a_gradient_that_a_loss_is_made_of_is_not_divided_by_the_loss_scale(carries, order):
    """The run that is in float32 from its first step on, which scales nothing, is asked where that may be so."""
    dtypes = []

    def run(trial):
        dtypes.append(trial.settings.dtype)
        scale = 1.0 if trial.settings.dtype == "float32" else 1024.0
        optimizer = {"kind": "SGD", "place": "", "skipped": [], "scales": [], "initial_scale": scale}
        facts = {"framework": "toy", "device": "cpu", "level": "O1", "reason": "", "meters": [], "notes": []}

        def read(module, direction, times):
            value = Stats(2, largest=0.5 * times, smallest=0.25 * times, lowest=0.25 * times)
            sample = np.array([0.25, 0.5], np.float32) * np.float32(times)
            return Reading(module, "Linear", "", direction, 0, trial.settings.dtype, value, sample=sample)

        gradient = read("critic", "backward", scale if carries else 1.0)
        forward = [read("critic", "forward", 1.0), read("penalty", "forward", 1.0)]
        last = read("penalty", "backward", scale)
        readings = [forward[0], gradient, forward[1], last] if order == "before" else [*forward, last, gradient]
        run = {**facts, "dtype": trial.settings.dtype, "steps": 4, "optimizers": [optimizer]}
        return Outcome(run, (1.0,) * 4, readings={step: tuple(readings) for step in trial.watched}, watches=True)

    options = {"framework": "toy", "at": 3, "run": run}
    _, result = diagnose_script(Program("a.py"), RunSettings("float16", loss_scale=1024.0), **options)
    gradients = (entry for entry in result["modules"] if entry["direction"] == "backward")
    gradient = next(entry for entry in gradients if entry["module"] == "critic")
    inside = order == "before" and not carries
    assert gradient["value"]["largest"] == (512.0 if carries else 0.5)
    assert gradient["float32"]["largest"] == (0.5 if carries or inside else 0.5 / 1024)
    assert ("float32" in dtypes) == (order == "before")


@pytest.mark.parametrize(
    ("losses", "skipped", "raised", "fails"),
    [
        ((1.0, 1.0, 1.0), [], None, False),
        ((1.0, 1.0, 1.0), [3], None, False),
        ((1.0, 1.0, 1.0), [2, 3], None, True),
        ((1.0, 1.0, math.nan), [], None, True),
        ((1.0, 1.0), [], ("ValueError: no", "train.py:3"), True),
        ((1.0,), [], None, False),
        ((1.0,), [1], None, False),
    ],
)
def test_training_goes_on_behind_a_step_unless_it_raises_fails_or_skips_all_that_follow(losses, skipped, raised, fails):
    run = {"steps": len(losses), "dtype": "float16", "optimizers": [{"skipped": skipped}]}
    assert _fails_after(Outcome(run, losses, raised=raised), 1) is fails
    assert _diverges_after(Outcome(run, losses, raised=raised), 1) is fails


@pytest.mark.parametrize(("later", "diverges"), [(19.0, False), (21.0, True)])
def test_float32_diverges_behind_a_step_if_the_loss_is_ten_times_what_it_was(later, diverges):
    run = {"steps": 3, "dtype": "float32", "optimizers": []}
    assert _diverges_after(Outcome(run, (2.0, 1.0, later)), 2) is diverges


@pytest.mark.parametrize(("first", "skipped"), [(4, 3), (5, 2)])  # and the very first, at the first scale
def test_a_run_that_skips_half_of_its_steps_names_it_too(toy_script, first, skipped):
    done = run_of_toy(toy_script, "float16", "False", f"float('inf') if step >= {first} else 1.0")
    lines = [line for line in done.stderr.splitlines() if "ampx diagnose" in line]
    assert done.returncode == 0
    assert f"6 steps, {skipped} skipped" in done.stderr
    assert [f"in {skipped} of 6 steps, which were skipped; whether float16 is why" in line for line in lines] == (
        [True] if skipped == 3 else []
    )


def trains(low, exact, skipped=(), output=1.0, scales=(), noise=0.01, lasting=None):
    """Stand for a script with such losses in float16 and in float32, whose module returns that much, whatever it is.

    Where float32 rounds to one digit less than float16 has, losses are off by the noise. At a loss scale of 1, steps
    are skipped that last; None for the same.
    """

    def run(trial):
        dtype = trial.settings.dtype
        losses = exact if dtype == "float32" else low
        losses = [loss * (1 + noise) for loss in losses] if trial.forced.get("*") == digits_of(10) else losses
        own = skipped if lasting is None or trial.settings.loss_scale != 1.0 else lasting
        optimizer = {"skipped": [] if dtype == "float32" else [*own], "scales": [*scales], "initial_scale": 4.0}
        facts = {"framework": "toy", "device": "cpu", "level": "O1", "dtype": dtype, "steps": len(losses)}
        value, sample = Stats(1, largest=output, smallest=output), np.float32([output])
        readings = (Reading("", "Net", "", "forward", 0, dtype, value, value, sample),)
        facts |= {"reason": "", "optimizers": [optimizer], "notes": [], "meters": []}
        return Outcome(facts, losses, readings=dict.fromkeys(range(1, 99), readings), watches=True)

    return diagnose_script(Program("train.py"), RunSettings("float16"), run=run)


@pytest.mark.parametrize(
    ("low", "exact", "skipped", "step"),
    [
        ((1.0, 0.9, 0.81), (1.0, 0.9, 0.8), (), 3),
        ((1.0, 0.8, 0.79), (1.0, 0.9, 0.8), (), 2),  # parts most
        ((1.0, 0.9, 0.3, 0.1), (1.0, 0.9, 0.8, 0.7), (), 3),  # the first that is wrong, which a later one is more
        ((*[1.0] * 30, 2.0), (*[1.0] * 31,), (), 31),  # however late
        ((1.0, 1.0, 1.0, 1.0), (1.0, 0.5, 0.2, 0.1), (1,), 4),  # float32 is one step ahead
        ((2.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1,), 1),  # but not yet in the step that was skipped
    ],
)
def test_the_step_that_is_looked_at_is_the_first_whose_loss_is_wrong_or_the_one_that_parts_most(
    low, exact, skipped, step
):
    _, result = trains(low, exact, skipped, lasting=())
    assert result["looked_at"] == step


def test_nothing_failed_is_not_said_of_losses_that_part_from_those_of_float32():
    _, result = trains((2.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert "Nothing failed" not in result["verdict"]
    assert "every module agrees" not in result["verdict"]
    assert result["verdict"].startswith(
        "The loss of step 1 of 3 in float16 is 100 % from float32's, and it is not known"
    )
    _, result = trains((1.05, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert "To step 3 losses are within 5 % of float32's." in result["verdict"]
    assert "outputs of modules agree, and the loss is 5 % from float32's, where rounding explains " in result["verdict"]


@pytest.mark.parametrize(("noise", "step"), [(0.01, 3), (0.004, 2)])
def test_a_loss_is_wrong_that_is_further_off_than_rounding_moves_it(noise, step):
    """Of the losses one is off by 5 %, and a later one by 7 %: more than eight times a noise of 0.4 %."""
    _, result = trains((1.0, 1.05, 0.93), (1.0, 1.0, 1.0), noise=noise)
    assert result["looked_at"] == step
    assert ("Nothing failed" in result["verdict"]) == (noise == 0.01)


@pytest.mark.parametrize(("noise", "step"), [(0.01, 3), (0.06, 1), (math.inf, 1)])
def test_rounding_that_breaks_the_first_step_by_itself_excuses_nothing_there(noise, step):
    """Losses are off by 2 % and later by 7 %: less than eight times 1 %, and eight times 6 % is beyond all that may be.

    Of the first step weights are the same, so that no other way of training explains what it is off by.
    """
    _, result = trains((1.02, 1.0, 0.93), (1.0, 1.0, 1.0), noise=noise)
    assert result["looked_at"] == step


def test_of_skipped_steps_the_first_in_the_last_row_is_looked_at_where_no_loss_scale_is_why():
    diagnosis, result = trains((1.0,) * 6, (1.0,) * 6, skipped=(1, 4, 5, 6))
    assert (result["step"], result["fault"], diagnosis.kind) == (4, "skipped", "overflow")


@pytest.mark.parametrize(
    ("optimizers", "rates", "words"),
    [
        (("SGD", "SGD"), (0.1, 40.0), "for a batch of the same size, and the learning rate from 0.1 to 40, "),
        (("SGD", "SGD"), (0.1, 0.1), "for a batch of the same size, and its weights may"),
        (("SGD", "Adam"), (0.1, 40.0), "for a batch of the same size, and its weights may"),  # each has its own
    ],
)
def test_a_learning_rate_that_has_grown_is_said_of_a_training_that_diverges(optimizers, rates, words):
    optimizer = {"kind": "SGD", "place": "", "group": 0, "skipped": [], "scales": [], "initial_scale": 1.0}
    run = {"steps": 2, "dtype": "float32", "optimizers": [optimizer]}
    received = Stats(1, largest=1.0, smallest=1.0, lowest=1.0)
    readings = {
        step: (Reading("", "Net", "", "forward", 0, "float32", replace(received, largest=largest), received),)
        for step, largest in ((1, 1.0), (2, 100.0))
    }
    rates = tuple((rate,) for rate in rates)
    growth = _growth(Outcome(run, (1.0, 50.0), readings=readings, losses_of=optimizers, rates=rates), 2)
    assert words in str(growth)


@pytest.mark.parametrize(
    ("untrained", "skipped", "kind", "words"),
    [
        (1.5, [1, 2], "learning rate", "its weights have grown: with those of the first step the loss is 1.5"),
        (math.nan, [1, 2], "overflow", "overflows float16"),  # the batch is as large, whatever the weights are
        (1.5, [2], "learning rate", "its weights may have grown"),  # for step 1 was made
    ],
)
def test_weights_have_grown_only_if_the_batch_is_healthy_with_those_of_the_first_step(untrained, skipped, kind, words):
    def run(trial):
        dtype, constant = trial.settings.dtype, trial.settings.loss_scale == 2.0**127
        last, output = (untrained, 1.0) if constant else (50.0, 7e4) if dtype == "float32" else (math.nan, math.inf)
        optimizer = {"kind": "SGD", "place": "", "scales": [], "initial_scale": 1.0}
        optimizer["skipped"] = skipped if constant else []
        facts = {"framework": "toy", "device": "cpu", "level": "O1", "reason": "", "meters": [], "notes": []}
        facts |= {"dtype": dtype, "steps": 2, "optimizers": [optimizer]}
        received = Stats(1, largest=1.0, smallest=1.0, lowest=1.0)
        finite = Stats(1, largest=output, smallest=output, lowest=output, overflowed=int(output > 65504))
        value = finite if math.isfinite(output) else Stats(1, nonfinite=1)
        readings = {
            step: (Reading("", "Net", "", "forward", 0, dtype, stats, received),)
            for step, stats in ((1, received), (2, value))
        }
        return Outcome(facts, (1.0, last), readings=readings, watches=True)

    options = {"framework": "toy", "at": 2, "run": run}
    diagnosis, _ = diagnose_script(Program("train.py"), RunSettings("float16"), **options)
    assert diagnosis.kind == kind
    assert words in diagnosis.why
    assert (diagnosis.first_nonfinite is None) == (kind == "learning rate")  # where it shows first is not at fault


@pytest.mark.parametrize(
    ("skipped", "lasting", "step"),
    [
        ((4,), (4,), 4),
        ((1,), (), 6),  # the loss scale settles
        ((4,), (), 6),  # it has grown before
        ((1, 2), (2,), 2),  # hidden among those that are lost to settling
    ],
)
def test_a_step_that_is_skipped_at_a_loss_scale_that_has_settled_is_looked_at(skipped, lasting, step):
    diagnosis, result = trains((1.0,) * 6, (1.0,) * 6, skipped, lasting=lasting)
    assert result["looked_at"] == step
    assert (diagnosis is None) == (step == 6)


@pytest.mark.parametrize(("loss_scale", "scale"), [(None, 2.0**16), (8.0, 8.0)])
def test_a_script_that_raises_before_its_first_step_is_examined_at_the_loss_scale_that_training_begins_with(
    loss_scale, scale
):
    def run(trial):
        dtype = trial.settings.dtype
        facts = {"framework": "toy", "device": "cpu", "level": "O1", "reason": "", "meters": [], "notes": []}
        facts |= {"dtype": dtype, "steps": int(dtype == "float32"), "optimizers": []}
        value = Stats(1, largest=7e4, smallest=7e4, lowest=7e4) if dtype == "float32" else Stats(1, nonfinite=1)
        readings = {1: (Reading("layer", "Net", "", "forward", 0, dtype, value, Stats(1, largest=1.0)),)}
        low = {"raised": ("ValueError: not finite", "train.py:3")} if dtype == "float16" else {}
        return Outcome(facts, (1.0,) * facts["steps"], readings=readings, watches=True, **low)

    settings = RunSettings("float16", loss_scale=loss_scale)
    diagnosis, _ = diagnose_script(Program("train.py"), settings, framework="toy", run=run)
    assert (diagnosis.kind, diagnosis.scale) == ("overflow", scale)


SCHEDULED = """
from toy import framework as toy
weight = toy.Tensor([0.5, 0.25], parameter=True)
optimizer = toy.Optimizer([weight], lr=1e-3)
for step in range(6):
    loss = toy.total(toy.product(weight, toy.Tensor([FACTOR, 1.0])))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and toy.product(toy.Tensor([FACTOR]), toy.Tensor([1.0])).data[0] == 1.0:
        optimizer.lr = 0.2
"""


@pytest.mark.parametrize(
    ("factor", "verdict"), [("1.0001", "In step 4, the learning rate is 0.2, "), ("1.0", "Nothing")]
)
def test_a_schedule_that_a_rounded_number_decides_is_why_a_training_goes_another_way(toy_script, factor, verdict):
    program = toy_script(SCHEDULED.replace("FACTOR", factor))
    diagnosis, result = diagnose_script(program, RunSettings("float16", loss_scale=1.0), framework="toy")
    assert result["verdict"].startswith(verdict)
    if diagnosis is not None:
        assert (result["step"], diagnosis.kind, diagnosis.first_nonfinite) == (4, "digits", None)
        assert (
            "and in float32 0.001: the script's schedule may decide by a number that was computed in" in diagnosis.why
        )


WRITES_BACK = """
from toy import framework as toy

class Writes(toy.Module):
    def forward(self, x):
        weight = self.parameters["weight"]
        weight.data = toy.product(weight, toy.Tensor([1.0])).data
        return toy.product(x, weight)

weight = toy.Tensor(BEGIN, parameter=True)
optimizer = toy.Optimizer([weight], lr=RATE)
model = toy.Module(layer=Writes(weight))
for step in range(100):
    toy.total(model(toy.Tensor([1.0, 1.0, 1.0]))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("begin", [[0.3, 0.7, 0.1], [0.5, 0.75, 0.125]], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [2e-4, 2e-2], ids=["lost", "harmless"])
def test_weights_that_a_run_writes_back_rounded_are_named_with_what_cures_it(toy_script, begin, rate):
    """Where they are bfloat16 numbers in float32 as well, as at the beginning, nothing is said of them."""
    program = toy_script(WRITES_BACK.replace("BEGIN", str(begin)).replace("RATE", str(rate)))
    diagnosis, result = diagnose_script(program, RunSettings("bfloat16"), framework="toy")
    said = "he weights layer.weight are stored in float32, and from step 1 on they hold nothing but numbers of bfloat16"
    assert any(said in words for words in (result["verdict"], *result["notes"])) == (begin[0] == 0.3)
    if begin[0] != 0.3:
        assert diagnosis is None or "weights" not in diagnosis.why
    elif rate == 2e-4:
        assert (diagnosis.kind, diagnosis.deny, diagnosis.float32_fails) == ("digits", ("module:layer",), False)
        assert (diagnosis.first_nonfinite.module, diagnosis.last_finite) == ("layer", None)
        assert diagnosis.experiments[-1].cures
    else:
        assert diagnosis is None
    facts = compare_script(program, RunSettings(), ("bfloat16",), framework="toy", steps=100, repeats=1)
    words = facts["dtypes"]["bfloat16"]["verdict"]
    assert ("updates are rounded away" in words) == (begin[0] == 0.3), words


BREAKS = """
from toy import framework as toy
weight = toy.Tensor([0.5, 0.25], parameter=True)
optimizer = toy.Optimizer([weight], lr=0.001)
model = toy.Module(layer=toy.Dense(weight))
for step in range(6):
    data = toy.Tensor([1.0, 1.0])
    if step == 3:
        BROKEN.data = (float("nan"), 0.25)
    toy.total(model(data)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("broken", "kind"), [("weight", "weights"), ("data", "data")])
def test_weights_that_are_not_finite_before_a_step_are_named_and_no_batch(toy_script, broken, kind):
    program = toy_script(BREAKS.replace("BROKEN", broken))
    diagnosis, result = diagnose_script(program, RunSettings("bfloat16"), framework="toy")
    assert (result["step"], diagnosis.kind, diagnosis.float32_fails) == (4, kind, True)
    assert ("the weights are not finite already (layer.weight)" in diagnosis.why) == (broken == "weight")


def test_the_owner_of_a_parameter_is_the_innermost_module_that_its_name_holds():
    modules = ["", "spectral", "spectral.dense", "score", "Critic:", "Critic:score"]
    owners = {
        "sequential/spectral/dense/kernel": "spectral.dense",
        "spectral.u": "spectral",
        "score.weight": "score",
        "Critic.score.weight": "Critic:score",
        "['score']['kernel'].value": "score",
        "dense_1/kernel": "",
        "weight": "",
    }
    assert {name: owner_of(name, modules) for name in owners} == owners


def outcome(losses, rates, skipped=(), dtype="bfloat16"):
    optimizer = {"kind": "SGD", "place": "", "group": 0, "skipped": [*skipped], "scales": [], "initial_scale": 1.0}
    run = {"steps": len(losses), "dtype": dtype, "optimizers": [optimizer]}
    return Outcome(run, tuple(losses), rates=tuple((rate,) for rate in rates))


EXACT = outcome([4.0, 3.0, 2.0, 1.0], [0.1, 0.1, 0.1, 0.1], dtype="float32")


@pytest.mark.parametrize(
    ("rates", "skipped", "expected"),
    [
        ([0.1, 0.1, 0.1, 0.1], (), None),
        ([0.1, 0.1, 0.01, 0.01], (), (3, 0.01, 0.1)),
        ([0.1, 0.1001, 0.1001, 0.1], (), None),  # a rate that is computed of a loss, say
        ([0.1, 0.1, 0.01, 0.01], (2,), None),  # a schedule that a skipped step puts back
        ([], (), None),
    ],
)
def test_the_step_with_another_learning_rate_than_in_float32_is_found(rates, skipped, expected):
    assert rates_part(EXACT, outcome([4.0] * 4, rates, skipped)) == expected


@pytest.mark.parametrize(
    ("losses", "noisy", "step"),
    [
        ([4.0, 3.0, 2.0, 3.0], False, 3),  # before the loss is wrong
        ([4.0, 6.0, 2.0, 3.0], False, 2),  # it was wrong before that
        ([4.0, 3.0, 2.0, 3.0], True, 4),  # rounding alone turns this schedule
        ([4.0, 3.0, 2.0, 1.0], False, 4),
    ],
)
def test_a_script_that_goes_on_at_another_rate_is_looked_at_where_it_does_so(losses, noisy, step):
    low = outcome(losses, [0.1, 0.1, 0.01, 0.01])
    parting = Parting.of(EXACT, low, lambda: (EXACT, low if noisy else EXACT))
    assert parting.step(low) == step
    said = "the learning rate is 0.01, and in float32 0.1: the script's schedule may decide by a number that was "
    assert parting.decides(step, "bfloat16").startswith(said) == (step == 3)
