"""`ampx diagnose` of a long run that goes on from its checkpoint, by the script's own option, with `--from`."""

import json

import pytest
import torch

from processes import run_python

# Batches are those of their step; that of step 8 is beyond float16.
SCRIPT = """
import sys
import torch
from torch import nn


class Energy(nn.Module):
    def forward(self, x):
        return x.square().mean(-1, keepdim=True).log1p()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Energy())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
begins = 0
if "--resume" in sys.argv:
    saved = torch.load(sys.argv[sys.argv.index("--resume") + 1])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begins = saved["step"]
print(begins, file=open("starts.txt", "a"))
for step in range(begins, 10):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)) * (1e4 if step == 7 else 1.0)
    optimizer.zero_grad()
    model(x).float().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "saved.pt")
    if "--stop" in sys.argv and step == 5:
        break
"""


@pytest.fixture
def folder(tmp_path):
    """The script, and its checkpoint after six steps in float32."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run_python("train.py", "--stop", cwd=tmp_path, check=True)
    (tmp_path / "starts.txt").unlink()
    return tmp_path


def test_a_run_that_resumes_by_its_own_option_is_diagnosed_from_there_and_its_checkpoint_stays(folder):
    before = (folder / "saved.pt").read_bytes()
    command = ("-m", "ampx", "diagnose", "--framework", "torch", "--device", "cpu", "--dtype", "float16", "--json")
    done = run_python(*command, "--from", "saved.pt", "train.py", "--resume", "saved.pt", cwd=folder, nests=True)
    report = json.loads(done.stdout)
    assert (report["step"], report["diagnosis"]["kind"]) == (2, "overflow")
    assert report["diagnosis"]["deny"] == ["module:1"]
    assert "Steps are counted from the checkpoint on. saved.pt is as it was before." in report["notes"]
    assert set((folder / "starts.txt").read_text().split()) == {"6"}
    assert (folder / "saved.pt").read_bytes() == before
    assert torch.load(folder / "saved.pt")["step"] == 6


def test_it_finds_what_the_whole_run_has_in_its_eighth_step(folder):
    command = ("-m", "ampx", "diagnose", "--framework", "torch", "--device", "cpu", "--dtype", "float16", "--json")
    report = json.loads(run_python(*command, "train.py", cwd=folder, nests=True).stdout)
    assert (report["step"], report["diagnosis"]["kind"], report["diagnosis"]["deny"]) == (8, "overflow", ["module:1"])
