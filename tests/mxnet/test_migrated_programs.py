"""What `ampx migrate` makes of programs written for MXNet's own amp trains to the same losses, bit for bit."""

from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")

PROGRAMS = Path(__file__).parents[1] / "programs" / "mxnet"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("gan.py", ["--amp", "--epochs", "1"], marks=pytest.mark.nightly),
        ("image_classification.py", ["--dtype", "amp", "--epochs", "1"]),
        pytest.param("word_language_model.py", ["--amp", "--steps", "10"], marks=pytest.mark.nightly),
    ],
)
def test_losses_are_those_of_the_program_under_the_old_names(name, arguments, train_program, migrate_program):
    program = PROGRAMS / name
    migrated = migrate_program(program)
    assert "amp.init_trainer" not in migrated.read_text()
    before = train_program(program, *arguments, install="ampx_mxnet.amp")
    assert train_program(migrated, *arguments) == before
