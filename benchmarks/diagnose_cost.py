"""What `ampx diagnose`, `compare` and `tune` cost: their time over that of the plain script, up to the step that fails.

A small PyTorch script is started by Python, by `ampx run` in float16 and by the command, in turn: each round is one
pair of each. Seconds are those of the processors that all processes used together, which other programs disturb less
than the wall clock. `python benchmarks/diagnose_cost.py [--quick]` prints the rows.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _paired import limited, shortest

SCRIPT = """
import sys
import torch
from torch import nn

class Energy(nn.Module):
    mean = 0.0
    def forward(self, x):
        x = x + self.mean
        return (x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()).abs().log1p()

fault, steps, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), Energy())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(steps):
    is_last = step == steps - 1
    x = torch.randn(64, width) * (1e4 if is_last and fault == "overflows" else 1.0)
    model[-1].mean = 100.0 if is_last and fault == "differs" else 0.0
    optimizer.zero_grad()
    model(x).float().mean().backward()
    optimizer.step()
"""
# A variance as a mean of squares minus a square overflows, or loses its digits while the loss stays finite.
FAULTS = {"overflows": "its last step overflows", "differs": "the loss of its last step is wrong", "trains": "nothing"}
COMMANDS = (("diagnose", "overflows"), ("diagnose", "differs"), ("diagnose", "trains"))
COMMANDS += (("compare", "trains"), ("compare", "differs"), ("tune", "overflows"))
OPTIONS = {"diagnose": (), "compare": ("--repeats", "1"), "tune": ("--repeats", "0", "-o", "tuned.toml", "--force")}
STEPS = len(COMMANDS)
"""How often `run` advances."""


@dataclass
class Measured:
    """Seconds of processors, and how many runs of the script a command tells of."""

    seconds: float
    runs: int


def measure(command: list[str], folder: str) -> Measured:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], cwd=folder, check=False, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(seconds, done.stderr.count(" …"))


def spread(values: list[float]) -> list[float]:
    """Return the median, the least and the largest."""
    return [statistics.median(values), min(values), max(values)]


def row(command: str, fault: str, steps: int, rounds: int) -> dict[str, object]:
    """Measure a command on the script with a fault."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        script = ["train.py", fault, str(steps), "256"]
        under = ["-m", "ampx", "run", "--dtype", "float16", *script]
        asked = ["-m", "ampx", command, "--dtype", "float16", *OPTIONS[command], *script]
        taken = [[measure(each, folder) for each in (script, under, asked)] for _ in range(rounds)]
    runs = statistics.median(ours.runs for *_, ours in taken)
    plain = spread([ours.seconds / plain.seconds for plain, _, ours in taken])
    by_run = spread([ours.seconds / run.seconds for _, run, ours in taken])
    return {
        "command": " ".join([f"ampx {command}", *OPTIONS[command][:2]]), "wrong": FAULTS[fault], "steps": steps,
        "rounds": rounds, "runs": runs, "plain": plain, "run": by_run,
    }  # fmt: skip


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each command.

    Args:
        quick: Fewer rounds.
        advance: Called after each measurement, for a progress bar.
    """
    rows = []
    for command, fault in limited(COMMANDS):
        rows.append(row(command, fault, 5 if shortest else 30, 1 if shortest else 3 if quick else 5))
        advance()
    return rows


if __name__ == "__main__":
    for each in run("--quick" in sys.argv):
        print(json.dumps(each), flush=True)
