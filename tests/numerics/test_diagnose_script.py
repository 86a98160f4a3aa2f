"""`ampx diagnose` of a script of the toy framework: the step, the place, and whether precision is to blame."""

from __future__ import annotations

import json

import pytest

import ampx
from ampx.backend import Reading, Stats
from ampx.numerics import report
from ampx.numerics.diagnose_script import diagnose_script, parameters_of
from ampx.run import RunSettings

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
    assert result["verdict"].startswith("Step 4: overflow: ")
    report.write(tmp_path / "out.json", result)
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == "ampx.diagnose/1"


def test_data_that_is_not_finite_is_no_matter_of_precision(diagnosed):
    diagnosis, result = diagnosed("float('nan') if step == 1 else 1.0")
    assert result["step"] == 2
    assert diagnosis.float32_fails
    assert diagnosis.precision_is_innocent


def test_a_script_that_does_not_fail_is_accused_of_nothing(diagnosed):
    diagnosis, result = diagnosed("1.0")
    assert diagnosis is None
    assert result["verdict"].startswith("Nothing failed in 6 steps in float16: the losses are finite, 0 steps were")


def test_a_step_that_was_asked_for_and_is_healthy_is_called_so(diagnosed):
    diagnosis, result = diagnosed("1.0", at=2)
    assert (diagnosis.kind, result["fault"]) == ("healthy", "asked for")


def test_a_step_that_the_script_does_not_make_is_an_error(diagnosed):
    with pytest.raises(ampx.TrialError, match="did not come to step 9"):
        diagnosed("1.0", at=9)


def test_parameters_are_what_an_operation_receives_beyond_its_module():
    def read(operation, inputs):
        return Reading("head", "Linear", operation, "forward", 0, "float16", Stats(4), inputs)

    module = read("", Stats(8, largest=2.0))
    readings = [read("linear", Stats(24, largest=5e5)), read("relu", Stats(4, largest=9e9)), module]
    assert parameters_of(readings)["head.parameters"] == Stats(16, largest=5e5)
    assert parameters_of([read("linear", Stats(24, largest=1.0)), module]) == {}
    assert parameters_of([read("linear", Stats(24, nonfinite=3)), module])["head.parameters"].nonfinite == 3
