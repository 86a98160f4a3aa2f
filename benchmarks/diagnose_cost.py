"""What `ampx diagnose` costs: its time over that of the plain script up to the step that fails, and its runs.

A script whose batches overflow float16 from one step on is started by Python, and by `ampx diagnose`, in turn; both
import PyTorch, each run of a diagnosis again. `python benchmarks/diagnose_cost.py [--steps 30] [--width 256]`.
"""

from __future__ import annotations

import argparse
import json
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

steps, width = map(int, sys.argv[1:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), Energy())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(steps):
    x = torch.randn(64, width) * (1e4 if step == steps - 1 else 1.0)
    optimizer.zero_grad()
    model(x).float().mean().backward()
    optimizer.step()
"""


def seconds(command: list[str]) -> tuple[float, str]:
    """Return how long a command takes, and what it writes to the standard error."""
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        command = [str(script), str(options.steps), str(options.width)]
        for _ in range(options.pairs):
            plain, _ = seconds([sys.executable, *command])
            whole, said = seconds([sys.executable, "-m", "ampx", "diagnose", "--dtype", "float16", *command])
            rows.append({"plain": plain, "diagnose": whole, "ratio": whole / plain, "runs": said.count(" …")})
    print(json.dumps({"median": statistics.median(row["ratio"] for row in rows), "pairs": rows}, indent=1))


if __name__ == "__main__":
    main()
