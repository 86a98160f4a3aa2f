"""`ampx compare`, `diagnose` and `tune` of a script of PyTorch, which knows nothing of ampx."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="the scripts train with PyTorch")

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1000):
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def test_compare_writes_a_table_and_a_report(ampx_command, script, tmp_path):
    options = ("--dtype", "bfloat16", "--steps", "8", "--repeats", "1", "--report", "out.json")
    done = ampx_command("compare", *options, script)
    assert "bfloat16" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["framework"], result["steps"]) == ("torch", 8)
    assert len(result["dtypes"]["bfloat16"]["losses"]) == 8
    assert result["dtypes"]["bfloat16"]["verdict"] in done.stdout


def test_a_report_of_no_kind_is_refused_before_anything_runs(ampx_command, script):
    done = ampx_command("compare", "--report", "out.pdf", script, code=2)
    assert "ends in .json or .html or .png" in done.stderr


def test_diagnose_names_the_step_and_the_line(ampx_command, tmp_path):
    lines = SCRIPT.replace("torch.randn(4, 8)", "torch.randn(4, 8) * (1e9 if step == 2 else 1)")
    (tmp_path / "train.py").write_text(lines)
    done = ampx_command("diagnose", "--dtype", "float16", "--report", "out.json", "train.py")
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["step"], result["diagnosis"]["kind"]) == (3, "overflow")
    assert result["diagnosis"]["first_nonfinite"]["module"] == "0"
    assert "step 3 of train.py, torch in float16: overflow: " in done.stdout


def test_run_takes_a_policy_file_over(ampx_command, script, tmp_path):
    (tmp_path / "ampx.toml").write_text('framework = "torch"\ndtype = "bfloat16"\ndeny = ["module:2"]\n')
    (tmp_path / script).write_text(SCRIPT.replace("range(1000)", "range(3)"))
    done = ampx_command("run", "--policy", "ampx.toml", "--report", "out.json", script)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["dtype"], result["steps"]) == ("bfloat16", 3)
    dtypes = {entry["dtype"] for entry in result["ops"] if entry["op"] == "addmm"}
    assert dtypes == {"bfloat16", "float32"}  # the first layer, and the last
    assert "policy=" in done.stderr


def test_run_refuses_a_policy_file_of_another_framework(ampx_command, script, tmp_path):
    (tmp_path / "ampx.toml").write_text('framework = "jax"\n')
    done = ampx_command("run", "--policy", "ampx.toml", script, code=2)
    assert "is for 'jax', and 'torch' is what computes" in done.stderr
