"""Ways to write one mixed-precision training step in PyTorch: ampx, by hand, and the libraries that offer the same.

A recipe takes a model and a raw optimizer and gives a function that does one step. Only what the libraries do
per step differs; the model, the optimizer and the loss are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from workloads import Batch, Workload

import ampx

Step = Callable[[Batch], torch.Tensor]
"""Train on one batch; gives the loss, a float32 scalar."""


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    Attributes:
        step: Does one step.
        before: Sets what the recipe needs process-wide; called before each timing, not timed.
        after: Takes back what would disturb another recipe on the same model; called before that one's timing.
        close: Undoes what the recipe set up.
    """

    step: Step
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


def by_ampx(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str, scaled: bool) -> Recipe:
    """Train as the README says; `scaled` is dynamic loss scaling, else the scale stays one."""
    amp = ampx.init("torch", device="cpu", dtype=dtype, loss_scale="dynamic" if scaled else 1.0)
    opt = amp.wrap_optimizer(optimizer, max_grad_norm=workload.max_grad_norm)

    def step(batch: Batch) -> torch.Tensor:
        opt.zero_grad()
        loss = workload.loss(model(batch[0]), batch[1])
        with ampx.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        return loss

    def close() -> None:
        set_casting(True)
        amp.shutdown()

    return Recipe(step, lambda: set_casting(True), close=close)


def by_hand(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str, scaled: bool) -> Recipe:
    """Train with `torch.autocast` and, when `scaled`, `torch.amp.GradScaler`, as torch's documentation writes it."""
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    native = getattr(torch, dtype)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=native):
            loss = workload.loss(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        if workload.max_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), workload.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Recipe(step, lambda: set_casting(False))


def by_accelerate(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str, scaled: bool
) -> Recipe:
    """Train with Hugging Face Accelerate. On a CPU it has bfloat16 without scaling only."""
    from accelerate import Accelerator

    _no_scaling("Accelerate", dtype, scaled)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    original = model.forward
    prepared, optimizer = accelerator.prepare(model, optimizer)
    casting = prepared.forward  # it replaces the model's own

    def before() -> None:
        set_casting(False)
        model.forward = casting

    def after() -> None:
        model.forward = original

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model(batch[0]), batch[1])
        accelerator.backward(loss)
        if workload.max_grad_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), workload.max_grad_norm)
        optimizer.step()
        return loss

    return Recipe(step, before, after, accelerator.free_memory)


def by_fabric(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str, scaled: bool
) -> Recipe:
    """Train with Lightning Fabric. On a CPU it has bfloat16 without scaling only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own dependencies' deprecations
        from lightning_fabric import Fabric

    _no_scaling("Fabric", dtype, scaled)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)

    def step(batch: Batch) -> torch.Tensor:
        wrapped_optimizer.zero_grad()
        loss = workload.loss(wrapped(batch[0]), batch[1])
        fabric.backward(loss)
        if workload.max_grad_norm is not None:
            fabric.clip_gradients(wrapped, wrapped_optimizer, max_norm=workload.max_grad_norm)
        wrapped_optimizer.step()
        return loss

    return Recipe(step, lambda: set_casting(False))


def _no_scaling(name: str, dtype: str, scaled: bool) -> None:
    if scaled or dtype != "bfloat16":
        raise ValueError(f"{name} on a CPU trains in bfloat16 without loss scaling only; asked for {dtype}, {scaled=}")


def set_casting(on: bool) -> None:
    # ampx casts process-wide; the others within their own autocast, which must not find it switched on already.
    torch.set_autocast_enabled("cpu", on)
    torch.set_autocast_cache_enabled(not on)
