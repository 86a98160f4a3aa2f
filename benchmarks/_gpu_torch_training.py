"""Training on the device: the same accuracy in every precision, and data parallelism."""

from __future__ import annotations

import importlib.util
import pathlib
import tempfile

import torch
import torch.distributed as dist
from _gpu_checks import Figure, NotHere, Setup, require
from _gpu_torch_steps import PATTERN, REFERENCE, backward, mlp, through_ampx
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampx


def accuracy_is_that_of_float32(setup: Setup) -> Figure:
    """A small convolutional network on images of 8×8: accuracies within half a point, over some seeds."""
    source, images, labels = _images(setup)
    count = len(images)
    test = slice(count * 3 // 4, None)
    seeds, epochs = (1, 3) if setup.quick else (3, 20)
    dtypes = ("float32", "bfloat16") if not setup.on_gpu else ("float32", "float16", "bfloat16")
    accuracy: dict[str, float] = {}
    for dtype in dtypes:
        right = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
            ).to(setup.device)
            with ampx.init("torch", device=setup.device, dtype=dtype, enabled=dtype != "float32") as amp:
                opt = amp.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
                for _ in range(epochs):
                    for batch in torch.randperm(count * 3 // 4, device=setup.device).split(64):
                        through_ampx(model, opt, images[batch], labels[batch])
            with torch.no_grad():
                right.append((model(images[test]).argmax(1) == labels[test]).float().mean().item())
        accuracy[dtype] = 100 * sum(right) / seeds
    line = f"{source}, {seeds} seeds: " + ", ".join(f"{name} {value:.2f} %" for name, value in accuracy.items())
    gap = 2.0 if setup.quick else 0.5
    require(all(value >= 97 - gap for value in accuracy.values()), line)
    require(all(abs(value - accuracy["float32"]) <= gap for value in accuracy.values()), line)
    return Figure(line, accuracy)


def _images(setup: Setup) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return scikit-learn's digits where that can be imported, else noisy copies of ten random images."""
    if importlib.util.find_spec("sklearn") is not None and not setup.quick:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
        images = torch.as_tensor(digits.images, dtype=torch.float32)[order, None] / 16
        return "digits", images.to(setup.device), torch.as_tensor(digits.target)[order].to(setup.device)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1800) % 10
    kinds = torch.rand(10, 1, 8, 8, generator=generator)
    images = kinds[labels] + 0.35 * torch.randn(1800, 1, 8, 8, generator=generator)
    order = torch.randperm(1800, generator=generator)
    return "generated images", images[order].to(setup.device), labels[order].to(setup.device)


def data_parallel_skips_and_agrees(setup: Setup) -> Figure:
    """DDP in one process (NCCL on a GPU): the reference trace, with the flag reduced and without."""
    if not dist.is_available() or (setup.on_gpu and not dist.is_nccl_available()):
        raise NotHere("torch was built without NCCL")
    transport = "nccl" if setup.on_gpu else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        meeting = (pathlib.Path(folder) / "store").as_uri()
        dist.init_process_group(transport, init_method=meeting, rank=0, world_size=1)
        try:
            for fused in (False, True):
                for group in (None, dist.group.WORLD):
                    trace = _train_in_parallel(setup, fused, group)
                    require(trace == REFERENCE, f"fused={fused}, group={group is not None}: {trace}, not {REFERENCE}")
        finally:
            dist.destroy_process_group()
    return Figure(f"{transport}, one process")


def _train_in_parallel(setup: Setup, fused: bool, group: object) -> list[float]:
    config = ampx.LossScale(growth_interval=3)
    with ampx.init("torch", device=setup.device, dtype="bfloat16", loss_scale=config) as amp:
        model = DistributedDataParallel(mlp().to(setup.device))
        raw = torch.optim.Adam(model.parameters(), fused=fused)
        opt = amp.wrap_optimizer(raw, process_group=group)
        x, trace = torch.randn(8, 16, device=setup.device), []
        for overflow in PATTERN:
            backward(model, opt, x, bool(overflow))
            opt.step()
            opt.zero_grad()
            trace.append(opt.loss_scale)
    return trace
