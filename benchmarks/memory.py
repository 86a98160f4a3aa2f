"""Memory of training in PyTorch by level: parameters, gradients, optimizer state, and the peak of the process.

Each level trains a few steps in a process of its own. Parameters, gradients and optimizer state are counted from the
tensors; the peak is the most memory that the process held resident above what it held before the model was made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from _memory import resident
from _paired import limited

LEVELS = ("O0", "O1", "O2", "O3")
WIDTH, DEPTH, BATCH = 1024, 8, 256
STEPS = len(LEVELS)
"""How often `run` advances."""


def measure(level: str) -> dict[str, float]:
    """Train three steps at `level` in this process and count, in MiB."""
    import torch
    from torch import nn
    from torch.nn import functional

    import ampx

    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randint(0, 10, (BATCH,))
    _train_small()  # libraries' own buffers are not the model's
    Path("/proc/self/clear_refs").write_text("5")  # from here on counts what the process holds at most
    before = resident("VmRSS")
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    dtype = "float32" if level == "O0" else "bfloat16"
    with ampx.init("torch", device="cpu", dtype=dtype, level=level) as amp:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if level in ("O2", "O3"):
            model, opt = amp.prepare(model, opt)
        opt = amp.wrap_optimizer(opt)
        for _ in range(3):
            opt.zero_grad(set_to_none=False)
            loss = functional.cross_entropy(model(x).float(), y)
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
            opt.step()
    parameters = list(model.parameters())
    masters = {id(p): p for group in opt.param_groups for p in group["params"]}.keys() - {id(p) for p in parameters}
    own = [p for group in opt.param_groups for p in group["params"] if id(p) in masters]
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": _mebibytes(parameters),
        "gradients": _mebibytes([p.grad for p in parameters if p.grad is not None]),
        "master weights": _mebibytes(own) + _mebibytes([p.grad for p in own if p.grad is not None]),
        "optimizer state": _mebibytes(state),
        "peak": resident("VmHWM") - before,
        "loss": float(loss.detach()),
    }


def _train_small() -> None:
    import torch
    from torch import nn

    model = nn.Linear(8, 8).bfloat16()
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 8, dtype=torch.bfloat16)).sum().backward()
    opt.step()


def _mebibytes(tensors: list) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every level in a process of its own."""
    rows: list[dict[str, object]] = []
    for level in limited(LEVELS):
        command = [sys.executable, str(Path(__file__)), level]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows.append({"level": level, **json.loads(output)})
        advance()
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in LEVELS:
        print(json.dumps(measure(sys.argv[1])))
    else:
        for row in run("--quick" in sys.argv):
            print(row)
