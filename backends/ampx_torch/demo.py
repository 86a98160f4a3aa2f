"""The trainer behind `ampx demo --framework torch`: an ordinary training script with three names of ampx."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

import ampx
from ampx.cli.demo import Digits, Run, RunResult, make_result, scale_trace, skipped_steps

LEARNING_RATE = 1e-2


def make_network() -> nn.Module:
    """Return a small convolutional network for images of shape (N, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class TorchTrainer:
    """Trains on the best device of this machine."""

    def train(self, data: Digits, run: Run, on_step: Callable[[], None]) -> RunResult:
        """Train and test; see `ampx.cli.demo.Trainer`.

        Sync: one after the first step and one after each epoch; none at each step beyond the optimizer's own.
        """
        enabled = run.dtype != "float32"
        with (
            _one_thread(),
            torch.random.fork_rng(devices=[]),  # all random numbers are drawn on the host
            ampx.init("torch", dtype=run.dtype if enabled else "auto", enabled=enabled) as amp,
        ):
            torch.default_generator.manual_seed(run.seed)
            return _train(data, run, on_step, amp)


@contextmanager
def _one_thread() -> Iterator[None]:
    # A network this small gains nothing from more, and on a busy machine the threads wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(data: Digits, run: Run, on_step: Callable[[], None], amp: ampx.Amp) -> RunResult:
    device = amp.effective.device
    images, labels, test_images, test_labels = (torch.as_tensor(part, device=device) for part in data)
    model = make_network().to(device)
    optimizer = ampx.wrap_optimizer(torch.optim.AdamW(model.parameters(), LEARNING_RATE), loss_scale=run.loss_scale)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.epochs)
    init_scale = optimizer.loss_scale
    events: list[ampx.Event] = []  # they tell the scale's trace without a sync at each step
    amp.on_event(events.append)

    losses: list[torch.Tensor] = []
    marks: list[tuple[int, float]] = []  # (steps done, time); from the first step on, which warms up
    for _ in range(run.epochs):
        order = torch.randperm(len(images)).to(device)
        for batch in order.split(run.batch_size):
            if len(batch) < run.batch_size:
                continue
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            losses.append(loss.detach())
            if len(losses) - 1 == run.overflow_at:
                loss = loss * math.inf
            with ampx.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            on_step()
            if len(losses) == 1:
                marks.append(_mark(losses))
        scheduler.step()
        marks.append(_mark(losses))
    trace = torch.stack(losses).float().tolist()
    final_scale = optimizer.loss_scale  # sends the events still due
    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).float().mean().item()
    return make_result(
        run,
        amp.effective,
        accuracy=right,
        losses=trace,
        marks=marks,
        scales=scale_trace(init_scale, events, len(trace)),
        skipped=skipped_steps(events),
        final_scale=final_scale,
    )


def _mark(losses: list[torch.Tensor]) -> tuple[int, float]:
    losses[-1].item()  # wait for the device
    return len(losses), time.perf_counter()
