"""What `ampx migrate` makes of programs written for TensorFlow 1 and Keras 2 trains to the same losses, bit for bit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="needs libcst, of the extra cli")
pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")

PROGRAMS = Path(__file__).parents[1] / "programs" / "tensorflow"
UNDER_THE_OLD_NAMES = """
import runpy, sys
import ampx_tensorflow as old
old.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(*command):
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gan.py", ["--amp"]),
        ("image_classification.py", ["--use_fp16"]),
        ("keras2_custom_loop.py", ["--policy", "mixed_bfloat16", "--epochs", "2"]),
        ("rnn_language_model.py", ["--amp"]),
    ],
)
def test_losses_are_those_of_the_program_under_the_old_names(name, arguments, tmp_path):
    made = tmp_path / name
    made.write_bytes((PROGRAMS / name).read_bytes())
    subprocess.run([sys.executable, "-m", "ampx.cli", "migrate", "--write", str(made)], check=True)
    assert not re.search(r"tf\.train\.experimental|LossScaleOptimizer\(", made.read_text())
    before = train("-c", UNDER_THE_OLD_NAMES, str(PROGRAMS / name), *arguments)
    assert train(str(made), *arguments) == before
