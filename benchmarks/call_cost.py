"""What importing ampx costs, and what its calls cost beside torch's where there is next to nothing to compute."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable

import _paired

_IMPORT = "import time; s = time.perf_counter(); import {module}; print(time.perf_counter() - s)"
MODULES = ("ampx", "ampx.api", "pluggy", "torch")
STEPS = len(MODULES) + 2
"""How often `run` advances."""


def import_time(module: str, runs: int) -> float:
    """Return the median seconds that `import module` adds to a bare interpreter."""
    command = [sys.executable, "-c", _IMPORT.format(module=module)]
    times = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(runs)]
    return statistics.median(times)


def calls(fused: bool, pairs: int) -> dict[str, object]:
    """Time `scale_loss` and `step` on one parameter of one element against GradScaler's three calls.

    There is no model and no backward: the gradient lies ready, so that only the calls are timed.
    """
    import torch
    from _paired import paired

    import ampx

    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    gradient, loss = torch.full((1,), 65536.0), parameter.sum()
    with ampx.init("torch", device="cpu", dtype="bfloat16", loss_scale="dynamic") as amp:
        opt = amp.wrap_optimizer(optimizer)

        def through_ampx() -> None:
            parameter.grad = None  # as zero_grad does in every loop
            with ampx.scale_loss(loss, opt):
                parameter.grad = gradient
            opt.step()

        def by_hand() -> None:
            parameter.grad = None
            scaler.scale(loss)
            parameter.grad = gradient
            scaler.step(optimizer)
            scaler.update()

        ratio = paired(through_ampx, by_hand, pairs=pairs, repeat=50)
    return {"calls": f"scale_loss, step: SGD{', fused' * fused}, one element", **ratio.to_json()}


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure the imports that a user of ampx waits for, and the calls of every step."""
    runs = 1 if _paired.shortest else 5 if quick else 21
    rows: list[dict[str, object]] = []
    for module in MODULES:
        rows.append({"import": module, "seconds": import_time(module, runs)})
        advance()
    for fused in (False, True):
        rows.append(calls(fused, 20 if quick else 100))
        advance()
    return rows


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(row)
