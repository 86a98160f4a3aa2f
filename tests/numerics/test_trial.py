"""A script runs in a process of its own: seeded, watched, and ended in time. The toy framework trains it."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import ampx
from ampx.numerics import template
from ampx.numerics.trial import Outcome, Trial, run_trial, warm_up_of
from ampx.run import RunSettings
from ampx.run.program import Program

SCRIPT = """
import atexit, random, sys
from toy import framework as toy

atexit.register(lambda: open("ended.txt", "w").write("at exit"))
weight = toy.Tensor([0.5, 0.25], parameter=True)
optimizer = toy.Optimizer([weight], lr=0.1)
for step in range(int(sys.argv[1])):
    data = toy.Tensor([FIRST, 1.0])
    loss = toy.total(toy.product(weight, data))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
AFTER
"""


def script(first="random.random()", after=""):
    return SCRIPT.replace("FIRST", first).replace("AFTER", after)


def test_two_runs_of_one_seed_draw_the_same_numbers_and_another_seed_draws_others(trial):
    first, second, other = trial(script(), "6"), trial(script(), "6"), trial(script(), "6", seed=1)
    assert len(first.losses) == 6
    assert first.losses == second.losses
    assert first.losses != other.losses


def test_a_script_ends_after_its_steps_and_what_is_to_run_at_the_end_runs(trial, tmp_path):
    outcome = trial(script(after="raise AssertionError('too late')"), "1000000", steps=7, warm_up=2)
    assert (outcome.steps, len(outcome.losses), outcome.ended_early) == (7, 7, True)
    assert len(outcome.times) == 5
    assert (tmp_path / "ended.txt").read_text() == "at exit"


def test_steps_in_which_operations_are_counted_are_not_timed():
    assert [warm_up_of(steps, 10) for steps in (1, 3, 4, 8, 20, 40, 1000)] == [0, 0, 3, 3, 5, 10, 10]


def test_losses_are_the_script_s_own(trial):
    """Weights, data and steps by arithmetic: the loss is w·d, and the gradient of w is d."""
    outcome = trial(script("2.0"), "3")
    first, second = 0.5, 0.25
    for loss in outcome.losses:
        assert loss == pytest.approx(first * 2 + second, rel=1e-6)
        first, second = first - 0.1 * 2, second - 0.1


def test_a_loss_that_is_not_finite_ends_a_run_that_is_to_stop_at_a_fault(trial):
    outcome = trial(script("float('inf') if step == 3 else 1.0"), "6", stop_at_fault=True)
    assert outcome.fault == (4, "loss")
    assert (outcome.steps, math.isinf(outcome.losses[-1])) == (4, True)


def test_skipped_steps_and_the_scale_are_told(trial):
    """A gradient of 1.0 that is multiplied by 2**16 is beyond float16; half of it is not."""
    outcome = trial(script("1.0"), "3", dtype="float16")
    assert (outcome.skipped, outcome.last_scale) == ([1], 2.0**15)


def test_watched_runs_share_a_folder_for_what_they_compile_and_timed_ones_compile_for_themselves(trial, tmp_path):
    text = script(after="import os; print(os.environ.get('AMPX_COMPILED'), file=open('folders.txt', 'a'))")
    for watched in ((1,), (2,), ()):
        trial(text, "2", watched=watched)
    first, second, timed = (tmp_path / "folders.txt").read_text().split()
    assert first == second
    assert Path(first).is_dir()
    assert timed == "None"


# A copy is no child of this process.
LOOKS = f"import os\nopen('looks.txt', 'a').write('new ' if os.getppid() == {os.getpid()} else 'copy ')\n"


@pytest.fixture
def copies(monkeypatch):
    """Let runs be copies of a process, as they are outside of tests."""
    if sys.platform != "linux":
        pytest.skip("processes are copied on Linux only")
    monkeypatch.delenv(template.SWITCHED_OFF, raising=False)
    yield
    template._close_kept()


def test_a_run_that_starts_with_what_another_has_imported_trains_alike(trial, copies, tmp_path):
    first = trial(LOOKS + script(), "6", shares_compiled=True)
    again = [trial(LOOKS + script(), "6", shares_compiled=True, imported=first.imported) for _ in range(2)]
    other = trial(LOOKS + script(), "6", shares_compiled=True, imported=first.imported, seed=1)
    assert (tmp_path / "looks.txt").read_text().split() == ["new", "copy", "copy", "copy"]
    assert {run.losses for run in (first, *again)} == {first.losses}
    assert other.losses != first.losses
    assert (tmp_path / "ended.txt").read_text() == "at exit"


def test_what_was_imported_in_another_environment_is_imported_anew(trial, copies, tmp_path):
    """A framework may read variables while it is imported, which a script may set before."""
    first = trial(LOOKS + script(), "2", shares_compiled=True)
    set_by_script = replace(first.imported, environment=first.imported.environment | {("OMP_NUM_THREADS", "3")})
    trial(LOOKS + script(), "2", shares_compiled=True, imported=set_by_script)
    assert (tmp_path / "looks.txt").read_text().split() == ["new", "new"]


def test_a_run_that_is_to_be_anew_is_no_copy(trial, copies, tmp_path, monkeypatch):
    first = trial(LOOKS + script(), "2", shares_compiled=True)
    monkeypatch.setenv(template.SWITCHED_OFF, "1")
    trial(LOOKS + script(), "2", shares_compiled=True, imported=first.imported)
    assert (tmp_path / "looks.txt").read_text().split() == ["new", "new"]


def test_the_memory_of_a_new_process_and_of_a_copy_is_what_the_script_takes_and_no_library(trial, copies, tmp_path):
    """A copy maps few pages of its libraries, and inherits what its parent has imported."""
    takes = "block = b'x' * (64 * 2**20)\n"
    new = trial(LOOKS + script(), "2")
    more = trial(LOOKS + takes + script(), "2")
    copies_of = [trial(LOOKS + text + script(), "2", imported=new.imported) for text in ("", takes)]
    assert (tmp_path / "looks.txt").read_text().split() == ["new", "new", "copy", "copy"]
    assert more.peak_host - new.peak_host == pytest.approx(64 * 2**20, abs=2 * 2**20)
    assert copies_of[1].peak_host - copies_of[0].peak_host == pytest.approx(64 * 2**20, abs=2 * 2**20)
    assert copies_of[0].peak_host == pytest.approx(new.peak_host, abs=6 * 2**20)


def test_a_copy_that_fails_is_an_error_with_its_last_words_and_the_next_one_runs(trial, copies):
    first = trial(script(), "2", shares_compiled=True)
    with pytest.raises(ampx.TrialError, match=r"(?s)exit code 1.*ZeroDivisionError"):
        trial("1 / 0", shares_compiled=True, imported=first.imported)
    assert trial(script(), "2", shares_compiled=True, imported=first.imported).losses == first.losses


def test_what_is_interrupted_while_a_copy_runs_ends_the_copy(trial, copies, tmp_path):
    first = trial(script(), "2", shares_compiled=True)
    waits = "import os, signal, time\nopen('process.txt', 'w').write(str(os.getpid()))\n"
    waits += f"os.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        trial(waits, shares_compiled=True, imported=first.imported)
    process = int((tmp_path / "process.txt").read_text())
    for _ in range(500):
        if not Path("/proc", str(process)).exists() or "\nState:\tZ" in Path(f"/proc/{process}/status").read_text():
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the copy goes on")


def test_a_script_that_fails_is_an_error_with_its_last_words(trial):
    with pytest.raises(
        ampx.TrialError, match=r"(?s)exit code 1.*`ampx run --dtype float32 train.py 'a b'`.*ZeroDivisionError"
    ):
        trial("1 / 0", "a b")


def test_a_script_that_is_not_there_is_a_wrong_option():
    trial = Trial(Program("trian.py"), RunSettings("float32"))
    with pytest.raises(ampx.InvalidOptionError, match=r"^the script 'trian.py' cannot be read: No such file") as raised:
        run_trial(trial)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(("ending", "words"), [("3", ""), ("2", ""), ("'too bad'", "too bad")])
def test_a_script_that_ends_itself_is_told_of_with_its_own_exit_code(trial, ending, words):
    code = ending if ending.isdigit() else "1"
    with pytest.raises(ampx.TrialError, match=rf"ended with exit code {code}; accepted") as raised:
        trial(f"import sys\nsys.exit({ending})")
    assert type(raised.value) is ampx.TrialError
    assert words in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert "meant for ampx" not in str(raised.value)


def test_a_script_that_refuses_an_option_of_ampx_is_told_where_that_belongs(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nsys.exit(2)")
    program = Program(str(tmp_path / "train.py"), arguments=("--repeats", "1"))
    with pytest.raises(ampx.TrialError, match=r"if --repeats was meant for ampx, write it before .*train\.py"):
        run_trial(Trial(program, RunSettings("float32")))


def test_a_script_that_trains_nothing_is_an_error(trial):
    with pytest.raises(ampx.TrialError, match="made no step that ampx saw"):
        trial("print('hello')")


def test_a_script_that_casts_by_itself_is_no_reference_in_float32(trial, monkeypatch):
    """The answer of the process is one of a script with mixed precision of its own."""

    def answer(command, **options):
        _, target = pickle.loads(Path(command[-1]).read_bytes())
        facts = {"steps": 3, "dtype": "bfloat16", "notes": ["By itself."]}
        target.write_bytes(pickle.dumps(Outcome(facts)))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", answer)
    assert trial("", dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(ampx.TrialError, match=r"computed in bfloat16; .* By itself\."):
        trial("", dtype="float32")


def test_a_script_that_asks_a_question_fails_at_once_and_is_told_why(trial):
    """What the user types would reach one run of several, and the question none of them could see."""
    read, write = os.pipe()  # nobody writes: who reads waits for ever
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        with pytest.raises(ampx.TrialError, match=r"nothing from the standard input[\s\S]*EOFError"):
            trial("input('how many steps? ')", "1")
    finally:
        os.dup2(before, 0)
        for descriptor in (read, write, before):
            os.close(descriptor)


def test_a_script_from_the_standard_input_is_refused_since_it_could_be_read_once_only():
    with pytest.raises(ampx.InvalidOptionError, match=r"'-' is the standard input.*Write the script to a file"):
        run_trial(Trial(Program("-", False, ()), RunSettings("float32")))


def test_an_optimizer_s_own_numbers_of_steps_are_those_of_the_script_by_its_turns():
    """Two optimizers in turn, as of a GAN: the first step of the second is the script's second."""
    optimizers = [
        {"group": group, "kind": kind, "place": "", "initial_scale": 8.0, "scales": scales, "skipped": skipped}
        for group, kind, scales, skipped in [(1, "Adam", [], []), (2, "SGD", [(1, 4.0), (2, 2.0)], [1, 2])]
    ]
    outcome = Outcome({"optimizers": optimizers}, losses=(1.0,) * 6, losses_of=("Adam", "SGD") * 3)
    assert outcome.skipped == [2, 4]
    assert [outcome.scale_at(step) for step in range(1, 7)] == [8.0, 8.0, 8.0, 4.0, 8.0, 2.0]
    assert replace(outcome, losses_of=()).skipped == [1, 2]
