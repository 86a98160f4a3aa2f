"""What `ampx diagnose` and `ampx compare` cost: their time over that of the plain script up to the step that fails.

A script whose batches overflow float16 from one step on is started by Python, by `ampx run` in float16, by `ampx
diagnose`, and, without the overflow, by `ampx compare`, in turn: each round is one pair of each. Seconds are those of
the wall clock, and of the processors that all processes used together, which other programs disturb less.
`python benchmarks/diagnose_cost.py [--steps 30] [--width 256] [--pairs 5] [--repeats 1]`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn

class Energy(nn.Module):
    def forward(self, x):
        return x.square().mean(-1, keepdim=True).log1p()

steps, width, fails = map(int, sys.argv[1:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), Energy())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(steps):
    x = torch.randn(64, width) * (1e4 if fails and step == steps - 1 else 1.0)
    optimizer.zero_grad()
    model(x).float().mean().backward()
    optimizer.step()
"""


def measure(command: list[str]) -> dict[str, float]:
    """Return the seconds that a command takes, by the wall clock and of processors, and how many runs it tells of."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *command], check=False, capture_output=True, text=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "processors": processors, "runs": done.stderr.count(" …")}


def spread(rows: list[dict[str, dict[str, float]]], name: str, other: str, clock: str) -> dict[str, float]:
    """Return the median, the least and the largest of the paired ratios of two commands."""
    ratios = [row[name][clock] / row[other][clock] for row in rows]
    return {"median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="of ampx compare")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        fails = [str(script), str(options.steps), str(options.width), "1"]
        trains = [*fails[:-1], "0"]
        repeats = ["--repeats", str(options.repeats), "--steps", str(options.steps)]
        commands = {
            "plain": fails,
            "run": ["-m", "ampx", "run", "--dtype", "float16", *fails],
            "diagnose": ["-m", "ampx", "diagnose", "--dtype", "float16", *fails],
            "compare": ["-m", "ampx", "compare", "--dtype", "float16", *repeats, *trains],
        }
        for _ in range(options.pairs):
            rows.append({name: measure(command) for name, command in commands.items()})
    pairs = (("diagnose", "plain"), ("diagnose", "run"), ("compare", "plain"), ("compare", "run"))
    ratios = {
        f"{name} / {other}, {clock}": spread(rows, name, other, clock)
        for name, other in pairs
        for clock in ("wall", "processors")
    }
    print(json.dumps({"steps": options.steps, "width": options.width, "ratios": ratios, "rounds": rows}, indent=1))


if __name__ == "__main__":
    main()
