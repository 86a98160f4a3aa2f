"""`compare` and `tune` on a network of real size, and the optimizer phase of as many weights."""

from __future__ import annotations

from typing import Any

import torch
from _gpu_checks import Figure, Setup, require
from _gpu_torch_cost import LIMIT
from _gpu_torch_models import images
from optimizer_phase import measure
from torch.nn import functional

import ampx

# Number and shape of tensors: about as many weights as BERT-base has; and many small ones.
SETS = ((110, (1000, 1000)), (300, (64, 64)))


def compare_and_tune_judge_resnet50(setup: Setup) -> Figure:
    """ResNet-50, one batch: how far from float32, which modules stay in it, and what that makes of the speed."""
    model = images(setup, None if setup.is_tiny else 32)
    torch.manual_seed(0)
    network = model.make().to(setup.device, memory_format=torch.channels_last)

    def step(network: Any) -> torch.Tensor:
        return functional.cross_entropy(network(model.inputs).float(), model.labels)

    rows: dict[str, Any] = {}
    parts = []
    for dtype in ("float16", "bfloat16") if setup.on_gpu else ("bfloat16",):
        place: Any = {"dtype": dtype, "framework": "torch", "device": setup.device}
        compared = ampx.compare(step, network, **place)
        policy = ampx.tune(step, network, repeats=0 if setup.is_tiny else 8, **place)
        rows[dtype] = {
            "loss_error": compared.loss_error,
            "gradient_error": compared.gradient_error,
            "verdict": compared.verdict,
            "policy": policy.to_json(),
        }
        parts.append(
            f"{dtype}: loss off by {compared.loss_error:.1e}, gradients by {compared.gradient_error:.1e}; tune says "
            f"{policy.dtype}, {len(policy.deny)} in float32, {policy.replays} replays: {policy.reasons['dtype']}"
        )
    line = "; ".join(parts)
    require(all(row["loss_error"] < 0.25 for row in rows.values()), line)
    return Figure(line, rows)


def optimizer_phase_takes_no_longer(setup: Setup) -> Figure:
    """From scaled gradients to new weights, against GradScaler: fused AdamW and SGD, without clipping and with it."""
    judged = not setup.is_tiny
    rows: dict[str, Any] = {}
    for count, shape in SETS if judged else ((4, (16, 16)),):
        for optimizer in ("AdamW", "SGD"):
            for clip in (False, True):
                ratio = measure(count, shape, optimizer, clip, 30 if judged else 4, setup.device)
                rows[f"{count} of {shape[0]}x{shape[1]}, {optimizer}{', clipped' if clip else ''}"] = ratio.to_json()
    line = ", ".join(f"{name} {row['ratio']:.3f}" for name, row in rows.items())
    if judged:
        require(all(row["ratio"] <= LIMIT for row in rows.values()), line)
    return Figure(f"ampx/torch: {line}", rows)
