"""The trainer behind `ampx demo --framework paddle`: an ordinary training script with three names of ampx."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

import ampx
from ampx.cli.demo import Digits, Run, RunResult, make_result, scale_trace, skipped_steps

LEARNING_RATE = 1e-2


def make_network() -> nn.Layer:
    """Return a small convolutional network for images of shape (N, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2D(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class PaddleTrainer:
    """Trains on the best device of this machine.

    A float32 run with a loss scale computes in float32 and scales for real: on the CPU, where Paddle casts nothing,
    it is all that mixed precision does there.
    """

    def train(self, data: Digits, run: Run, on_step: Callable[[], None]) -> RunResult:
        """Train and test; see `ampx.cli.demo.Trainer`.

        Sync: one after the first step and one after each epoch; none at each step beyond the optimizer's own.
        """
        enabled = run.dtype != "float32" or run.loss_scale is not None
        state = paddle.get_rng_state()
        try:
            with ampx.init("paddle", dtype=run.dtype, enabled=enabled) as amp:
                paddle.seed(run.seed)
                return _train(data, run, on_step, amp)
        finally:
            paddle.set_rng_state(state)


def _train(data: Digits, run: Run, on_step: Callable[[], None], amp: ampx.Amp) -> RunResult:
    images, labels, test_images, test_labels = (paddle.to_tensor(part) for part in data)
    model = make_network()
    scheduler = paddle.optimizer.lr.CosineAnnealingDecay(LEARNING_RATE, run.epochs)
    raw = paddle.optimizer.AdamW(scheduler, parameters=model.parameters())
    optimizer = ampx.wrap_optimizer(raw, loss_scale=run.loss_scale)
    loss_function = nn.CrossEntropyLoss()
    init_scale = optimizer.loss_scale
    events: list[ampx.Event] = []
    amp.on_event(events.append)
    shuffle = np.random.default_rng(run.seed)

    losses: list[Any] = []
    marks: list[tuple[int, float]] = []  # (steps done, time); from the first step on, which warms up
    for _ in range(run.epochs):
        order = shuffle.permutation(len(images))
        for start in range(0, len(order) - run.batch_size + 1, run.batch_size):
            batch = paddle.to_tensor(order[start : start + run.batch_size])
            loss = loss_function(model(images[batch]), labels[batch])
            losses.append(loss.detach())
            if len(losses) - 1 == run.overflow_at:
                loss = loss * math.inf
            with ampx.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.clear_grad()
            on_step()
            if len(losses) == 1:
                marks.append(_mark(losses))
        scheduler.step()
        marks.append(_mark(losses))
    trace: Any = paddle.stack(losses).astype("float32").tolist()
    model.eval()
    with paddle.no_grad():
        right = (model(test_images).argmax(1) == test_labels).astype("float32").mean().item()
    return make_result(
        run,
        amp.effective,
        accuracy=right,
        losses=trace,
        marks=marks,
        scales=scale_trace(init_scale, events, len(trace)),
        skipped=skipped_steps(events),
        final_scale=optimizer.loss_scale,
    )


def _mark(losses: list[Any]) -> tuple[int, float]:
    losses[-1].item()  # wait for the device
    return len(losses), time.perf_counter()
