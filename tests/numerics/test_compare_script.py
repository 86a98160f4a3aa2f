"""`ampx compare`: what is said of runs, which are made up here but for one of the toy framework."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import ampx
from ampx.backend import Reading, Stats
from ampx.numerics import report
from ampx.numerics.compare_script import (
    Sweep,
    compare_script,
    ends_alike,
    parse_dtypes,
    parting,
)
from ampx.numerics.trial import Outcome, TrialError
from ampx.run import RunSettings
from ampx.run.program import Program

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
    }
    readings = {
        step: tuple(reading(name, "float32" if step in trial.float32 else dtype, step) for name in LAYERS)
        for step in trial.watched
    }
    memory = {"float32": 2**30}.get(dtype, 2**29)
    return Outcome(run, tuple(losses), (SECONDS[dtype],) * 3, memory, None, readings, watches=True)


def reading(name, dtype, step):
    """A value; in step 3 that of <second> in float16 is off by half, unless casting is off there."""
    off = 0.5 if (name, dtype, step) == ("<second>", "float16", 3) else 0.0
    sample = np.array([1.0, 2.0], np.float32) * (1 + off)
    return Reading(name, "Linear", "", "forward", 0, dtype, Stats(2), sample=sample)


@pytest.fixture
def compared():
    program = Program("<b>.py", False, ("--x",))
    sweep = Sweep.parse("--batch-size=32,64")
    return compare_script(program, RunSettings(), ("float16", "bfloat16"), steps=4, sweep=sweep, run=pretended)


def test_the_ratio_of_speeds_is_of_pairs_of_runs(compared):
    assert compared["dtypes"]["float16"]["speed"]["ratio"] == 2.0
    assert compared["dtypes"]["bfloat16"]["speed"]["ratio"] == 0.5
    assert compared["dtypes"]["float16"]["memory_ratio"] == 0.5


def test_the_step_and_the_module_where_runs_part_are_named(compared):
    float16, bfloat16 = compared["dtypes"]["float16"], compared["dtypes"]["bfloat16"]
    assert (float16["parts_at"], float16["modules"]["first"]["module"]) == (3, "<second>")
    assert (bfloat16["parts_at"], bfloat16["modules"]["first"]) == (None, None)
    assert float16["losses"] == [1.0, 0.5, "inf", "nan"]
    assert float16["modules"]["first"]["error"] == pytest.approx(0.5)
    heat = float16["modules"]["map"]["errors"][1]  # of <second>, by step
    assert heat == [0.0, 0.0, pytest.approx(0.5), 0.0]


def test_the_verdict_says_whether_it_is_right_and_worth_it(compared):
    assert compared["dtypes"]["float16"]["verdict"] == (
        "float16: 2.00 times the speed of float32 (2.00 to 2.00), 0.50 times the memory, the loss parts from "
        "float32's at step 3 of 4 (step 3 skipped), first in <second>, and has 2 values not finite: look before you "
        "rely on it."
    )
    assert compared["dtypes"]["bfloat16"]["verdict"].endswith("in all 4 steps: not worth it on this machine.")


class Page(HTMLParser):
    """Notes what a page reaches for, and its tags."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.reached = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.reached += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]


def test_that_auto_chooses_float32_is_an_answer():
    def on_an_old_cpu(trial):
        outcome = pretended(replace(trial, settings=replace(trial.settings, dtype="float32")))
        return replace(outcome, run={**outcome.run, "reason": "no instructions"})

    report = compare_script(Program("a.py"), RunSettings(), ("auto",), steps=4, run=on_an_old_cpu)
    assert report["dtypes"] == {}
    assert report["verdict"].startswith("Nothing to gain on this machine: no instructions.")
    with pytest.raises(TrialError, match="float16"):
        compare_script(Program("a.py"), RunSettings(), ("float16",), steps=4, run=on_an_old_cpu)


def test_the_page_escapes_names_and_reaches_for_nothing(compared, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra demo")
    report.write(tmp_path / "out.html", compared)
    text = (tmp_path / "out.html").read_text()
    page = Page(text)
    assert "<b>.py" not in text
    assert "&lt;b&gt;.py" in text
    assert page.reached == []
    assert not page.tags & {"script", "b", "second", "link", "img", "iframe"}
    assert text.count("<svg") == 4  # losses, the sweep, two heat maps
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == "ampx.compare/1"


def test_the_picture_is_a_png(compared, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra demo")
    report.write(tmp_path / "out.png", compared)
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


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
