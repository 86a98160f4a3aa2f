"""Kill -9 at a random step, start again: the run ends as one that was never interrupted, to the last bit."""

import io
import json
import pathlib
import random
import runpy
import signal
import subprocess
import sys
import time

import pytest
import torch

from processes import run_python

SCRIPT = pathlib.Path(__file__).with_name("resume_script.py")
STEPS, CHECKPOINT_EVERY = 48, 5


def run_to_the_end(folder, place):
    """Run the script; gives the first step it took and what it wrote at the end."""
    done = run_python(SCRIPT, folder, place, check=True)
    return int(done.stdout.split()[0]), torch.load(folder / "result.pt", weights_only=True)


@pytest.fixture
def run_here(monkeypatch):
    """Run the script in this process, which has torch already."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(folder, place):
        runpy.run_path(str(SCRIPT))["main"](folder, place)
        return torch.load(folder / "result.pt", weights_only=True)

    with torch.random.fork_rng(devices=[]):
        yield run


def kill_after(step, seconds, folder, place):
    """Run the script and kill it some time after it finished a step: in the checkpoint or in the next step."""
    command = [sys.executable, str(SCRIPT), str(folder), place]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        for line in process.stdout:
            process.stdin.write("\n")
            if int(line) == step:
                time.sleep(seconds)
                process.kill()
                break
        process.stdout.read()
    assert process.returncode == -signal.SIGKILL


def assert_identical(left, other, where="result"):
    """Compare nested containers; tensors by their bits."""
    assert type(left) is type(other), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == other.dtype, where
        assert torch.equal(left, other), where
    elif isinstance(left, dict):
        assert left.keys() == other.keys(), where
        for key in left:
            assert_identical(left[key], other[key], f"{where}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(other), where
        for position, (first, second) in enumerate(zip(left, other, strict=True)):
            assert_identical(first, second, f"{where}[{position}]")
    else:
        assert left == other, where


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_killed_run_resumes_bit_identically(place, tmp_path, run_here):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # shown when the test fails
    chance = random.Random(seed)
    step = chance.randrange(CHECKPOINT_EVERY, STEPS - 1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = run_here(whole, place)
    kill_after(step, chance.uniform(0.0, 0.004), killed, place)
    assert not (killed / "result.pt").exists()
    first, resumed = run_to_the_end(killed, place)
    assert first in (step // CHECKPOINT_EVERY * CHECKPOINT_EVERY, (step + 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY)
    assert_identical(resumed, expected)

    # The run was worth interrupting: it skipped, grew and backed off, and trained.
    scales = [(old, new) for _, old, new in expected["events"]]
    assert any(new > old for old, new in scales)
    assert any(new < old for old, new in scales)
    assert [entry[0] for entry in expected["trace"]] == list(range(STEPS))
    (loss,) = json.loads(expected["amp"])["groups"][0]["losses"]
    assert loss["growth_tracker"] > 0
    assert expected["optimizer"]["state"][0]["step"] < STEPS
