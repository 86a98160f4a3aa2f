"""What one training step costs through ampx, against the hand-written native recipe, in PyTorch.

Native: `with torch.autocast(...)` around the forward, `GradScaler.scale/step/update`. ampx: `init`,
`wrap_optimizer`, `scale_loss`. Same model, same data, same dtype, dynamic loss scale in both; the losses are
compared first.

A second comparison takes bfloat16 as most people write it, without any scaler: there the native recipe does not look
at the gradients at all, and the ratio is the price of never applying a non-finite step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from _paired import Ratio, paired
from torch import nn

import ampx

WORKLOADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # name: model, input shape, pairs
    "mlp 32-64-64-10, batch 32": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        (32, 32),
        400,
    ),
    "mlp 40 layers of 64, batch 64": (
        lambda: nn.Sequential(*[m for _ in range(40) for m in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 10)),
        (64, 64),
        100,
    ),
    "mlp 1024-4096-1024-10, batch 256": (
        lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)),
        (256, 1024),
        24,
    ),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


def measure(workload: str, optimizer: str, dtype: str, scaled: bool, quick: bool) -> Ratio:
    """Time one workload with one optimizer.

    Args:
        workload: A key of `WORKLOADS`.
        optimizer: A key of `OPTIMIZERS`.
        dtype: The compute dtype.
        scaled: Both sides scale the loss dynamically; else neither does, and only ampx checks the gradients.
        quick: Fewer pairs.

    Raises:
        AssertionError: The two recipes do not train alike, so that a ratio would mean nothing.
    """
    make_model, shape, pairs = WORKLOADS[workload]
    torch.manual_seed(0)
    # One model and one raw optimizer serve both recipes: where memory happens to lie makes more difference than
    # the recipes do.
    model = make_model()
    x, y = torch.randn(*shape), torch.randint(0, 10, (shape[0],))
    loss_fn = nn.CrossEntropyLoss()
    amp = ampx.init("torch", device="cpu", dtype=dtype, loss_scale="dynamic" if scaled else 1.0)
    native_opt = OPTIMIZERS[optimizer](list(model.parameters()))
    opt = amp.wrap_optimizer(native_opt)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    native_dtype = getattr(torch, dtype)

    def through_ampx() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_fn(model(x), y)
        with ampx.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        return loss

    def native() -> torch.Tensor:
        native_opt.zero_grad()
        with torch.autocast("cpu", dtype=native_dtype):
            loss = loss_fn(model(x), y)
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(native_opt)
            scaler.update()
        else:
            loss.backward()
            native_opt.step()
        return loss

    def casting(on: bool) -> Callable[[], None]:
        def switch() -> None:
            torch.set_autocast_enabled("cpu", on)
            torch.set_autocast_cache_enabled(not on)

        return switch

    on, off = casting(True), casting(False)
    start = copy.deepcopy((model.state_dict(), native_opt.state_dict()))
    on()
    ours = [through_ampx().item() for _ in range(4)]
    model.load_state_dict(start[0])
    native_opt.load_state_dict(start[1])
    off()
    theirs = [native().item() for _ in range(4)]
    assert ours == theirs, (ours, theirs)
    result = paired(
        through_ampx, native, pairs=max(pairs // (4 if quick else 1), 8), before_a=on, before_b=off, warmup=4
    )
    on()
    amp.shutdown()
    return result


def run(quick: bool) -> list[dict[str, object]]:
    """Measure every workload with every optimizer."""
    dtype = "float16" if "float16" in _native_dtypes() else "bfloat16"
    rows: list[dict[str, object]] = []
    for native, scaled, used in (("autocast + GradScaler", True, dtype), ("autocast, unchecked", False, "bfloat16")):
        for workload in WORKLOADS:
            for optimizer in OPTIMIZERS:
                ratio = measure(workload, optimizer, used, scaled, quick)
                told = {"native": native, "workload": workload, "optimizer": optimizer, "dtype": used}
                rows.append({**told, **ratio.to_json()})
    return rows


def _native_dtypes() -> frozenset[str]:
    with ampx.init("torch", device="cpu", dtype="float32") as amp:
        return frozenset(amp.backend.device("cpu").native)


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        name = f"{row['native']:22} {row['workload']:34} {row['optimizer']:12} {row['dtype']}"
        times = f"ampx {row['median_a'] * 1e6:9.0f} us  by hand {row['median_b'] * 1e6:9.0f} us"
        print(f"{name} {times}  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]")
