"""Every run starts from one checkpoint, which the script resumes from and writes anew; the toy framework trains."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

import ampx
from ampx.numerics.checkpoint import started_from
from ampx.numerics.compare_script import compare_script
from ampx.numerics.diagnose_script import diagnose_script
from ampx.numerics.tune_script import tune_script
from ampx.run import RunSettings

# A batch of step 12 is beyond float16; a checkpoint of step 10 is there.
SCRIPT = """
import json, os
from toy import framework as toy

CHECKPOINT = "NAME"
saved = json.load(open(CHECKPOINT)) if os.path.exists(CHECKPOINT) else {"step": 0, "weight": [0.5, 0.25]}
print(saved["step"], file=open("starts.txt", "a"))
weight = toy.Tensor(saved["weight"], parameter=True)
optimizer = toy.Optimizer([weight], lr=0.001)
for step in range(saved["step"], 14):
    data = toy.Tensor([7e4 if step == 11 and FAILS else 1.0, 1.0])
    toy.total(toy.product(weight, data)).backward()
    optimizer.step()
    optimizer.zero_grad()
    json.dump({"step": step + 1, "weight": [0.5, 0.25]}, open(CHECKPOINT, "w"))
"""
SAVED = json.dumps({"step": 10, "weight": [0.5, 0.25]})
SETTINGS = RunSettings("float16", loss_scale=1.0)


@pytest.fixture(params=["saved.json", "saved/state.json"])
def checkpoint(request, tmp_path):
    """A file, and a folder, each of which a script resumes from."""
    file = tmp_path / request.param
    file.parent.mkdir(exist_ok=True)
    file.write_text(SAVED)
    return file


def text(checkpoint, tmp_path, fails=True):
    return SCRIPT.replace("NAME", str(checkpoint.relative_to(tmp_path))).replace("FAILS", str(fails))


def named(checkpoint, tmp_path):
    return tmp_path / checkpoint.relative_to(tmp_path).parts[0]


def test_each_run_of_a_diagnosis_starts_from_it_and_steps_count_from_there(toy_script, checkpoint, tmp_path):
    program = toy_script(text(checkpoint, tmp_path))
    with started_from(named(checkpoint, tmp_path)) as run:
        diagnosis, report = diagnose_script(program, SETTINGS, framework="toy", run=run)
    assert (diagnosis.kind, report["step"], report["notes"]) == ("overflow", 2, [])
    starts = (tmp_path / "starts.txt").read_text().split()
    assert len(starts) >= 3
    assert set(starts) == {"10"}
    assert checkpoint.read_text() == SAVED
    assert {path.name for path in tmp_path.iterdir()} == {
        *("train.py", "starts.txt", "toy_plugin-1.0.dist-info", named(checkpoint, tmp_path).name)
    }


def test_without_it_each_run_goes_on_where_the_one_before_ended(toy_script, checkpoint, tmp_path):
    program = toy_script(text(checkpoint, tmp_path))
    with suppress(ampx.TrialError):  # it does not come to the step any more
        diagnose_script(program, SETTINGS, framework="toy")
    assert (tmp_path / "starts.txt").read_text().split()[:2] == ["10", "11"]


def test_each_run_of_a_comparison_starts_from_it(toy_script, checkpoint, tmp_path):
    program = toy_script(text(checkpoint, tmp_path, fails=False))
    with started_from(named(checkpoint, tmp_path)) as run:
        compare_script(program, RunSettings(), ("float16",), framework="toy", steps=3, run=run)
    assert set((tmp_path / "starts.txt").read_text().split()) == {"10"}
    assert checkpoint.read_text() == SAVED


def test_each_run_of_a_search_starts_from_it(toy_script, checkpoint, tmp_path):
    program, saved = toy_script(text(checkpoint, tmp_path, fails=False)), named(checkpoint, tmp_path)
    with started_from(saved) as run:
        tune_script(program, SETTINGS, framework="toy", steps=3, repeats=0, run=run, checkpoint=saved)
    starts = (tmp_path / "starts.txt").read_text().split()
    assert len(starts) >= 3
    assert set(starts) == {"10"}
    assert checkpoint.read_text() == SAVED


def test_it_is_put_back_after_an_interrupt(tmp_path):
    (tmp_path / "saved").write_text("before")

    def interrupted(trial):
        (tmp_path / "saved").write_text("halfway")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), started_from(tmp_path / "saved", interrupted) as run:
        run(None)
    assert (tmp_path / "saved").read_text() == "before"


def test_what_the_script_leaves_as_it_is_is_not_written(tmp_path):
    saved = tmp_path / "saved"
    saved.write_text("before")
    number = saved.stat().st_ino
    with started_from(saved, lambda trial: trial) as run:
        assert run("a trial") == "a trial"
    assert saved.stat().st_ino == number


@pytest.mark.parametrize("name", ["there is none", "."])
def test_what_is_no_checkpoint_is_refused_before_anything_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(ampx.InvalidOptionError, match=r"--from .* is no checkpoint; accepted: a file or folder"),
        started_from(Path(name)),
    ):
        raise AssertionError("something runs")
