"""What one training step costs through ampx, in PyTorch, against the recipe by hand and against its peers.

Three comparisons. By hand with dynamic loss scaling: `autocast` and `GradScaler`, in float16 where the CPU computes
it, else in bfloat16. By hand without: `autocast` in bfloat16 as most people write it, which does not look at the
gradients at all, so that the ratio is the price of never applying a non-finite step. And the peers, which on a CPU
do the latter. The losses of both sides are compared first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from _paired import Ratio, paired
from recipes import Recipe, by_accelerate, by_ampx, by_fabric, by_hand
from workloads import WORKLOADS, Workload, chosen

import ampx

COMPARISONS: tuple[tuple[str, Callable[..., Recipe], bool], ...] = (
    # name in the tables, recipe, dynamic loss scaling
    ("autocast + GradScaler", by_hand, True),
    ("autocast, unchecked", by_hand, False),
    ("Accelerate", by_accelerate, False),
    ("Fabric", by_fabric, False),
)


def measure(workload: Workload, other: Callable[..., Recipe], dtype: str, scaled: bool, quick: bool) -> Ratio:
    """Time one workload through ampx and through another recipe.

    Raises:
        AssertionError: The two recipes do not train alike, so that a ratio would mean nothing.
    """
    torch.manual_seed(0)
    batch = workload.batch()
    # One model and one raw optimizer serve both recipes: where memory happens to lie makes more difference than the
    # recipes do.
    model = workload.model()
    optimizer = workload.optimizer(list(model.parameters()))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ours = by_ampx(workload, model, optimizer, dtype, scaled)
    try:
        ours.before()
        our_losses = [ours.step(batch).item() for _ in range(4)]
        theirs = other(workload, model, optimizer, dtype, scaled)
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
        theirs.before()
        their_losses = [theirs.step(batch).item() for _ in range(4)]
        check(our_losses, their_losses, dtype)
        result = paired(
            lambda: ours.step(batch),
            lambda: theirs.step(batch),
            pairs=max(workload.pairs // (8 if quick else 1), 8),
            before_a=lambda: (theirs.after(), ours.before()),
            before_b=theirs.before,
            warmup=4,
        )
        theirs.close()
    finally:
        ours.close()
    return result


def check(ours: list[float], theirs: list[float], dtype: str) -> None:
    """Refuse to compare what does not train alike.

    The unclipped recipes do the same operations in the same order, and the losses are equal to the last bit. Where
    gradients are clipped or unscaled in another order of roundings, a float32 rounding of a gradient may tip the
    rounding of a weight to the compute dtype in the next forward: one unit in its last place, relative to the loss.
    """
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine - other) <= epsilon * abs(other), (ours, theirs)


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every workload against every recipe.

    Args:
        quick: Fewer pairs, and each model once.
        advance: Called after each measurement, for a progress bar.
    """
    scaled_dtype = "float16" if "float16" in native_dtypes() else "bfloat16"
    rows: list[dict[str, object]] = []
    for name, recipe, scaled in COMPARISONS:
        for workload in chosen(quick):
            dtype = scaled_dtype if scaled else "bfloat16"
            ratio = measure(workload, recipe, dtype, scaled, quick)
            rows.append({"against": name, "workload": workload.name, "dtype": dtype, **ratio.to_json()})
            advance()
    return rows


STEPS = len(COMPARISONS) * len(WORKLOADS)
"""How often `run` advances."""


def native_dtypes() -> frozenset[str]:
    """Return the 16-bit dtypes that this CPU computes in hardware."""
    with ampx.init("torch", device="cpu", dtype="float32") as amp:
        return frozenset(amp.backend.device("cpu").native)


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        times = f"ampx {row['median_a'] * 1e6:9.0f} us  other {row['median_b'] * 1e6:9.0f} us"
        spread = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        print(f"{row['against']:22} {row['workload']:56} {row['dtype']} {times}  ratio {row['ratio']:.3f} {spread}")
