"""What `ampx migrate` makes of programs written for TensorFlow 1 and Keras 2 trains to the same losses, bit for bit."""

import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")

PROGRAMS = Path(__file__).parents[1] / "programs" / "tensorflow"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("gan.py", ["--amp"], marks=pytest.mark.nightly),
        pytest.param("image_classification.py", ["--use_fp16"], marks=pytest.mark.nightly),
        ("keras2_custom_loop.py", ["--policy", "mixed_bfloat16", "--epochs", "2"]),
        pytest.param("rnn_language_model.py", ["--amp"], marks=pytest.mark.nightly),
    ],
)
def test_losses_are_those_of_the_program_under_the_old_names(name, arguments, train_program, migrate_program):
    program = PROGRAMS / name
    migrated = migrate_program(program)
    assert not re.search(r"tf\.train\.experimental|LossScaleOptimizer\(", migrated.read_text())
    before = train_program(program, *arguments, install="ampx_tensorflow")
    assert train_program(migrated, *arguments) == before
