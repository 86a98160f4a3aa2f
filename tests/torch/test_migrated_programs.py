"""What `ampx migrate` makes of programs written for `torch.amp` and `apex.amp` trains to the same losses."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")

from ampx_torch.casting import lstm  # noqa: E402

FOLDER = Path(__file__).parents[1] / "programs"
PROGRAMS = FOLDER / "torch_amp"
NIGHTLY = pytest.mark.nightly
APEX = "ampx_torch.apex"
AMP = {"gan.py": [], "image_classification.py": ["--amp"], "language_model.py": ["--amp"]}
FLOAT32 = {"gan.py": ["--fp32"], "image_classification.py": [], "language_model.py": []}
SHORT = {
    "gan.py": ["--niter", "2"],
    "image_classification.py": ["--epochs", "3"],
    "language_model.py": ["--steps", "25"],
}


@pytest.fixture
def migrated(migrate_program):
    """Return a function that writes what a program becomes, with nothing left of the old calls; it tells its path."""

    def migrate(program):
        migration = migrate_program(program, codes=(0, 1))
        assert not {"GradScaler", "torch.autocast", "amp.initialize", "amp.scale_loss"} & set(
            re.findall(r"[\w.]+", migration.read_text())
        )
        return migration

    return migrate


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gan.py", marks=NIGHTLY),
        "image_classification.py",
        pytest.param("language_model.py", marks=NIGHTLY),
    ],
)
def test_losses_of_torch_amp_are_those_of_the_program_before(name, migrated, train_program):
    if name == "language_model.py" and not lstm.computable(torch.bfloat16):
        pytest.skip("PyTorch has no bfloat16 LSTM on this CPU, so the program before cannot run")
    arguments = [*AMP[name], *SHORT[name]]
    before = train_program(PROGRAMS / name, *arguments)
    assert train_program(migrated(PROGRAMS / name), *arguments) == before
    # The comparison would mean nothing if neither of the two computed in low precision.
    assert train_program(PROGRAMS / name, *FLOAT32[name], *SHORT[name])["losses"] != before["losses"]


def test_switched_off_it_trains_in_float32_as_before(migrated, train_program):
    program = PROGRAMS / "image_classification.py"
    assert train_program(migrated(program), "--epochs", "1") == train_program(program, "--epochs", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "else_of_apex"),
    [
        pytest.param("gan.py", ["--niter", "1"], False, marks=NIGHTLY),
        pytest.param("gan.py", ["--niter", "1", "--opt-level", "O2"], False, marks=NIGHTLY),
        pytest.param("rnn.py", ["--epochs", "1"], False, marks=NIGHTLY),
        pytest.param("rnn.py", ["--epochs", "1", "--opt-level", "O2", "--loss-scale", "128.0"], False, marks=NIGHTLY),
        pytest.param("image_classification.py", ["--epochs", "1"], True, marks=NIGHTLY),
        ("image_classification.py", ["--epochs", "1", "--opt-level", "O2"], True),
    ],
)
def test_losses_of_apex_are_those_of_the_program_under_the_old_name(
    name, arguments, else_of_apex, migrated, train_program
):
    program = FOLDER / "apex" / name
    migration = migrated(program)
    assert train_program(migration, *arguments, install=APEX if else_of_apex else None) == train_program(
        program, *arguments, install=APEX
    )


@pytest.mark.nightly
def test_clipping_of_apex_masters_differs_by_rounding_only(migrated, train_program):
    """A fused optimizer clips in its own kernel: float32 products in another order."""
    program, arguments = FOLDER / "apex" / "language_model.py", ["--fp16", "--num_train_epochs", "1"]
    before = train_program(program, *arguments, install=APEX)
    after = train_program(migrated(program), *arguments, install=APEX)
    assert after["losses"][0] == before["losses"][0]
    # The forward pass is in float16, so that nothing finer than its unit roundoff of a loss can be expected to stay.
    assert after["losses"] == pytest.approx(before["losses"], rel=2.0**-11)


OVERFLOWS = """\
import json
import sys

import torch

amp = sys.argv[1] == "amp"
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled=amp)
found = []
for step in range(8):
    x = torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
        loss = model(x).pow(2).mean() * (float("inf") if amp and step in (2, 3) else 1.0)
    optimizer.zero_grad()
    if amp:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    found.append([loss.item(), scaler.get_scale(), model.weight.tolist()])
print(json.dumps(found))
"""


@pytest.mark.parametrize("switch", ["amp", "float32"])
def test_skipped_steps_scales_and_weights_are_those_before(switch, migrated, train_program, tmp_path):
    program = tmp_path / "before" / "overflows.py"
    program.parent.mkdir()
    program.write_text(OVERFLOWS)
    before = train_program(program, switch)
    assert train_program(migrated(program), switch) == before
    # The first step overflows at 65536; two are made to; else it doubles after two finite steps in a row.
    expected = [32768.0, 32768.0, 16384.0, 8192.0, 8192.0, 16384.0, 16384.0, 32768.0]
    assert [scale for _, scale, _ in before] == (expected if switch == "amp" else [1.0] * 8)
