"""What a step through ampx costs on the device, against torch's own recipe: syncs, kernels, time."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _gpu_checks import Figure, NotHere, Setup, require
from _gpu_torch_steps import Transformer, by_hand, mlp, optimizers, through_ampx
from _paired import paired
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampx

Step = Callable[[], object]
# A wrapped step may cost this much of the native one, as the median of pairs.
LIMIT = 1.02


@contextlib.contextmanager
def _both(
    setup: Setup, model: nn.Module, x: torch.Tensor, make: Callable[[Any], torch.optim.Optimizer], dtype: str
) -> Iterator[tuple[Step, Step, Step, Step]]:
    """Return one step through ampx, the native one, and for each what switches casting as it needs."""
    torch.manual_seed(0)
    model = model.to(setup.device)
    other = copy.deepcopy(model)
    y = torch.randint(0, 4, (len(x),), device=setup.device)
    native_dtype = getattr(torch, dtype)
    with ampx.init("torch", device=setup.device, dtype=dtype, loss_scale="dynamic") as amp:
        opt = amp.wrap_optimizer(make(model.parameters()))
        raw, scaler = make(other.parameters()), torch.amp.GradScaler(setup.device)

        on, off = casting(setup, True), casting(setup, False)
        yield (
            lambda: through_ampx(model, opt, x, y),
            lambda: by_hand(other, raw, scaler, x, y, native_dtype),
            on,
            off,
        )
        on()


def casting(setup: Setup, on: bool) -> Step:
    """Return what switches casting on, as a step through ampx needs it, or off for one by torch's recipe."""

    def switch() -> None:
        torch.set_autocast_enabled(setup.device, on)
        torch.set_autocast_cache_enabled(not on)

    return switch


def syncs_per_step_are_not_more(setup: Setup) -> Figure:
    """With fused optimizers none, in torch's error mode; with others as many as GradScaler makes."""
    if not setup.on_gpu:
        raise NotHere("a CPU has no syncs")
    counts: dict[str, list[int]] = {}
    for name, (make, _) in optimizers(setup.device).items():
        with _both(setup, mlp(), torch.randn(8, 16, device=setup.device), make, "float16") as (ours, theirs, on, off):
            on()
            for _ in range(12):  # past the first steps, in which the scale finds its place and state is made
                ours()
            if "fused" in name:
                with _sync_mode("error"):  # long enough for the batches in which flags travel to the host
                    for _ in range(100):
                        ours()
            mine = count_syncs(ours)
            off()
            for _ in range(12):
                theirs()
            counts[name] = [mine, count_syncs(theirs)]
    line = ", ".join(f"{name} {mine}/{native}" for name, (mine, native) in counts.items())
    require(all(mine <= native for mine, native in counts.values()), f"syncs in 10 steps, ampx/torch: {line}")
    return Figure(f"in 10 steps, ampx/torch: {line}", counts)


@contextlib.contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def count_syncs(step: Step) -> int:
    """Count the waits for the device in ten steps, as torch's warning mode tells them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _sync_mode("warn"):
            for _ in range(10):
                step()
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def kernels_per_step_are_not_more(setup: Setup) -> Figure:
    """On a GPU kernels, copies and fills as the profiler sees them; on a CPU calls of operators, not judged."""
    counts: dict[str, list[float]] = {}
    for name, (make, _) in optimizers(setup.device).items():
        with _both(setup, mlp(), torch.randn(8, 16, device=setup.device), make, "bfloat16") as (ours, theirs, on, off):
            count = count_kernels if setup.on_gpu else _count_operators
            on()
            mine = count(ours)
            off()
            counts[name] = [mine, count(theirs)]
    line = ", ".join(f"{name} {mine:g}/{native:g}" for name, (mine, native) in counts.items())
    if setup.on_gpu:
        if not any(native for _, native in counts.values()):
            raise NotHere("the profiler sees no kernels: containers may forbid it")
        require(all(native > 0 for _, native in counts.values()), f"kernels a step, ampx/torch: {line}")
        require(all(mine <= native for mine, native in counts.values()), f"kernels a step, ampx/torch: {line}")
    return Figure(f"{'kernels' if setup.on_gpu else 'operators'} a step, ampx/torch: {line}", counts)


def count_kernels(step: Step) -> float:
    """Count the kernels, copies and fills of a step, as the profiler sees them on the device."""
    steps = 4
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() or () if event.device_type == on_device]
    # Named regions such as "Optimizer.step#Adam.step" and the profiler's own work are on the time line as well.
    return sum("#" not in name and "Activity Buffer" not in name for name in names) / steps


class _Counter(TorchDispatchMode):
    """Counts the operators that are called."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def _count_operators(step: Step) -> float:
    for _ in range(3):
        step()
    with _Counter() as counter:
        step()
    return counter.count


def step_takes_no_longer_small(setup: Setup) -> Figure:
    """A small perceptron: what counts is the work of the host."""
    if setup.is_tiny:
        return _compare_times(setup, mlp(16, 2), (64, 16), 8, 5)
    return _compare_times(setup, mlp(256, 6), (64, 256), 300, 10)


def step_takes_no_longer_large(setup: Setup) -> Figure:
    """A transformer: what counts is the work of the device."""
    if setup.is_tiny:
        return _compare_times(setup, Transformer(16, 2, 1), (2, 4, 16), 8, 1)
    return _compare_times(setup, Transformer(1024, 16, 8), (16, 512, 1024), 40, 2)


def _compare_times(setup: Setup, model: nn.Module, shape: tuple[int, ...], pairs: int, repeat: int) -> Figure:
    dtype = "float16" if setup.on_gpu else "bfloat16"
    rows: dict[str, dict[str, float]] = {}
    for name in ("Adam foreach", "Adam fused"):
        make, _ = optimizers(setup.device)[name]
        x = torch.randn(*shape, device=setup.device)
        with _both(setup, model, x, make, dtype) as (ours, theirs, on, off):
            ratio = paired(
                whole(setup, ours, repeat),
                whole(setup, theirs, repeat),
                pairs=pairs,
                before_a=on,
                before_b=off,
            )
        rows[name] = {**ratio.to_json(), "steps_in_one_timing": repeat}
    line = ", ".join(
        f"{name} {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}], "
        f"{row['median_b'] / repeat * 1e6:.0f} us natively"
        for name, row in rows.items()
    )
    if not setup.is_tiny:
        require(all(row["ratio"] <= LIMIT for row in rows.values()), f"ampx/torch: {line}")
    return Figure(f"ampx/torch: {line}", rows)


def whole(setup: Setup, step: Step, repeat: int) -> Step:
    """Return some steps up to the moment when the device has finished them."""

    def steps() -> None:
        for _ in range(repeat):
            step()
        if setup.on_gpu:
            torch.cuda.synchronize()

    return steps
