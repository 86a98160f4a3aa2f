"""Steps per second through ampx in the 16-bit dtypes against float32, in PyTorch, on every whole-step workload."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _paired import paired
from recipes import by_ampx
from whole_step import native_dtypes
from workloads import WORKLOADS, Batch, Workload, chosen


def measure(workload: Workload, dtype: str, quick: bool) -> dict[str, object]:
    """Time one workload in `dtype` through ampx against plain float32, each with a model of its own."""
    torch.manual_seed(0)
    batch = workload.batch()
    plain = workload.model()
    raw = workload.optimizer(list(plain.parameters()))

    def in_float32(batch: Batch = batch) -> None:
        raw.zero_grad()
        workload.loss(plain(batch[0]), batch[1]).backward()
        if workload.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), workload.max_grad_norm)
        raw.step()

    model = workload.model()
    recipe = by_ampx(workload, model, workload.optimizer(list(model.parameters())), dtype, dtype == "float16")
    try:
        ratio = paired(
            lambda: recipe.step(batch),
            in_float32,
            pairs=max(workload.pairs // (8 if quick else 2), 8),
            before_a=recipe.before,
            before_b=lambda: torch.set_autocast_enabled("cpu", False),
        )
    finally:
        recipe.close()
    return {"against": "float32", "workload": workload.name, "dtype": dtype, **ratio.to_json()}


DTYPES = tuple(sorted(native_dtypes()))
STEPS = len(DTYPES) * len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every workload in every 16-bit dtype that this CPU computes; quickly, each model once in bfloat16."""
    rows = []
    for dtype in DTYPES[:1] if quick else DTYPES:
        for workload in chosen(quick):
            rows.append(measure(workload, dtype, quick))
            advance()
    return rows


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        print(f"{row['workload']:58} {row['dtype']} {1 / row['ratio']:.2f} times as fast")
