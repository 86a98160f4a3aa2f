"""What a type checker says of scripts that use ampx; needs mypy, and runs in the environment `types`."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="needs mypy, of the extra dev")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check():
    """Return what mypy --strict says of a program, one line a finding."""

    def run(program):
        command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return run


def test_a_misspelt_name_is_an_error(check):
    (line,) = check("import ampx\nampx.scael_loss(1)\n")
    assert 'has no attribute "scael_loss"' in line


def test_public_names_and_the_version_are_known_with_their_types(check):
    program = """\
import ampx
amp = ampx.init("torch", dtype="bfloat16")
optimizer = ampx.wrap_optimizer(object(), loss_scale=ampx.LossScale(init_scale=8.0))
reveal_type(amp)
reveal_type(ampx.__version__)
ampx.debug
"""
    lines = check(program)
    assert [line.split('"')[1] for line in lines] == ["ampx.session.Amp", "str"]
