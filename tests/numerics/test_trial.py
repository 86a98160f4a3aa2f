"""A script runs in a process of its own: seeded, watched, and ended in time. The toy framework trains it."""

from __future__ import annotations

import math
import textwrap

import pytest

import ampx
from ampx.numerics.trial import Outcome, Trial, run_trial
from ampx.run import RunSettings
from ampx.run.program import Program

SCRIPT = """
import atexit, random, sys
from toy import framework as toy

atexit.register(lambda: open("ended.txt", "w").write("at exit"))
weight = toy.Tensor([0.5, 0.25], parameter=True)
optimizer = toy.Optimizer([weight], lr=0.1)
for step in range(int(sys.argv[1])):
    data = toy.Tensor([random.random(), FACTOR])
    loss = toy.total(toy.product(weight, data))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Return a function that runs a script of the toy framework in a fresh folder."""
    info = tmp_path / "toy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[ampx]\ntoy = toy.plugin\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)

    def run(factor="1.0", steps="6", text=SCRIPT, dtype="float32", trial_steps=None, **options) -> Outcome:
        (tmp_path / "train.py").write_text(textwrap.dedent(text).replace("FACTOR", factor))
        return run_trial(
            Trial(Program("train.py", False, (steps,)), RunSettings(dtype), "toy", steps=trial_steps, **options)
        )

    return run


def test_two_runs_of_one_seed_draw_the_same_numbers_and_another_seed_draws_others(trial):
    first, second, other = trial(), trial(), trial(seed=1)
    assert len(first.losses) == 6
    assert first.losses == second.losses
    assert first.losses != other.losses


def test_a_script_ends_after_its_steps_and_what_is_to_run_at_the_end_runs(trial, tmp_path):
    text = SCRIPT.replace("print", "raise SystemExit('too late') or print")
    outcome = trial(trial_steps=7, steps="1000000", warm_up=2, text=text)
    assert (outcome.steps, len(outcome.losses), outcome.ended_early) == (7, 7, True)
    assert len(outcome.times) == 5
    assert (tmp_path / "ended.txt").read_text() == "at exit"


def test_losses_are_the_script_s_own(trial):
    """Weights, data and steps by arithmetic: loss = w·d, and the gradient of w is d."""
    outcome = trial(text=SCRIPT.replace("random.random()", "2.0"), steps="3")
    first, second = 0.5, 0.25
    for loss in outcome.losses:
        assert loss == pytest.approx(first * 2 + second, rel=1e-6)
        first, second = first - 0.1 * 2, second - 0.1


def test_a_loss_that_is_not_finite_ends_a_run_that_is_to_stop_at_a_fault(trial):
    text = SCRIPT.replace("FACTOR", "float('inf') if step == 3 else 1.0")
    outcome = trial(text=text, stop_at_fault=True)
    assert outcome.fault == (4, "loss")
    assert (outcome.steps, math.isinf(outcome.losses[-1])) == (4, True)


def test_skipped_steps_and_the_scale_are_told(trial):
    outcome = trial(text=SCRIPT.replace("FACTOR", "60000.0 if step == 1 else 1.0"), dtype="float16")
    assert outcome.skipped == [1, 2]
    assert outcome.last_scale == 2.0**14


def test_a_script_that_fails_is_an_error_with_its_last_words(trial):
    with pytest.raises(ampx.TrialError, match=r"(?s)exit code 1.*ZeroDivisionError"):
        trial(text="1 / 0")


def test_a_script_that_trains_nothing_is_an_error(trial):
    with pytest.raises(ampx.TrialError, match="made no step that ampx saw"):
        trial(text="print('hello')")
