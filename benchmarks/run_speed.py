"""What `ampx run` costs: one training step of an unedited loop, against the same loop edited by hand for ampx.

Both sides share model, optimizer, session and wrapper, so that memory lies where it lies for both. In turn the patches
of `ampx run` are put in force for the unedited loop and taken away for the edited one. The first steps, in which
operations are counted, do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _paired import Ratio, paired
from whole_step import native_dtypes
from workloads import Batch, Workload, chosen

import ampx
from ampx.run import Run, RunSettings
from ampx.run.recorder import SAMPLED_STEPS
from ampx_torch.run import automate

DTYPES = ("bfloat16", "float16")
EACH_MODEL = chosen(quick=True)


@dataclass
class Patches:
    """What the region has put in place of torch's own; called to put it in force, or to take it away."""

    backward: Any
    true_backward: Any
    grad: Any

    def put(self) -> None:
        torch.autograd.backward = self.backward
        if self.grad is not None:
            torch.Tensor.grad = self.grad

    def take(self) -> None:
        torch.autograd.backward = self.true_backward
        if "grad" in vars(torch.Tensor):
            del torch.Tensor.grad


def unedited(workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
    """Train one step as a script does that knows nothing of mixed precision."""
    inputs, labels = batch
    loss = workload.loss(model(inputs), labels)
    loss.backward()
    if workload.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def edited(workload: Workload, model: torch.nn.Module, optimizer: Any, batch: Batch) -> Any:
    """Train one step as the user of ampx writes it."""
    inputs, labels = batch
    loss = workload.loss(model(inputs), labels)
    with ampx.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    if workload.max_grad_norm is not None:
        ampx.clip_grad_norm(optimizer, workload.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def measure(workload: Workload, dtype: str, quick: bool) -> Ratio:
    """Time one workload both ways."""
    torch.manual_seed(0)
    batch, model = workload.batch(), workload.model()
    run = Run("torch", RunSettings(dtype=dtype, device="cpu"))
    true_backward = torch.autograd.backward
    with automate(run):
        optimizer = workload.optimizer(list(model.parameters()))
        patches = Patches(torch.autograd.backward, true_backward, vars(torch.Tensor).get("grad"))
        for _ in range(SAMPLED_STEPS + 1):
            unedited(workload, model, optimizer, batch)
        managed = vars(optimizer)["_ampx_managed"]

        def by_run() -> None:
            managed.busy = False
            patches.put()

        def by_hand() -> None:
            managed.busy = True  # the raw optimizer, where the wrapper steps it
            patches.take()

        try:
            return paired(
                lambda: unedited(workload, model, optimizer, batch),
                lambda: edited(workload, model, managed.wrapped, batch),
                pairs=max(workload.pairs // (8 if quick else 1), 8),
                before_a=by_run,
                before_b=by_hand,
                warmup=4,
            )
        finally:
            by_run()


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every model in every dtype that the CPU computes.

    Args:
        quick: Fewer pairs.
        advance: Called after each measurement, for a progress bar.
    """
    rows: list[dict[str, object]] = []
    for dtype in DTYPES:
        for workload in EACH_MODEL:
            if dtype in native_dtypes():
                rows.append({"workload": workload.name, "dtype": dtype, **measure(workload, dtype, quick).to_json()})
            advance()
    return rows


STEPS = len(DTYPES) * len(EACH_MODEL)
"""How often `run` advances."""


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        times = f"ampx run {row['median_a'] * 1e6:9.0f} us  by hand {row['median_b'] * 1e6:9.0f} us"
        spread = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        print(f"{row['workload']:56} {row['dtype']:8} {times}  ratio {row['ratio']:.3f} {spread}")
