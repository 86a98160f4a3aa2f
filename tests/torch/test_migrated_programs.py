"""What `ampx migrate` makes of programs written for `torch.amp` trains to the same losses, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="needs libcst, of the extra cli")
pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")

PROGRAMS = Path(__file__).parents[1] / "programs" / "torch_amp"
AMP = {"gan.py": [], "image_classification.py": ["--amp"], "language_model.py": ["--amp"]}
FLOAT32 = {"gan.py": ["--fp32"], "image_classification.py": [], "language_model.py": []}
SHORT = {
    "gan.py": ["--niter", "2"],
    "image_classification.py": ["--epochs", "3"],
    "language_model.py": ["--steps", "25"],
}


def train(program, *arguments):
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def migrated(tmp_path):
    """Give a function that writes what a program becomes, and tells its path."""

    def migrate(program):
        made = tmp_path / program.name
        made.write_bytes(program.read_bytes())
        subprocess.run([sys.executable, "-m", "ampx.cli", "migrate", "--write", str(made)], check=True)
        text = made.read_text()
        assert "import ampx" in text
        assert "GradScaler" not in text
        assert "autocast(device_type" not in text
        return made

    return migrate


@pytest.mark.parametrize("name", sorted(AMP))
def test_losses_are_those_of_the_program_before(name, migrated):
    arguments = [*AMP[name], *SHORT[name]]
    before = train(PROGRAMS / name, *arguments)
    assert train(migrated(PROGRAMS / name), *arguments) == before
    # The comparison would mean nothing if neither of the two computed in low precision.
    assert train(PROGRAMS / name, *FLOAT32[name], *SHORT[name])["losses"] != before["losses"]


def test_switched_off_it_trains_in_float32_as_before(migrated):
    program = PROGRAMS / "image_classification.py"
    assert train(migrated(program), "--epochs", "1") == train(program, "--epochs", "1")
