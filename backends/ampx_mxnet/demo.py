"""The trainer behind `ampx demo --framework mxnet`: an ordinary training script with three names of ampx."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ampx
from ampx.cli.demo import Digits, Run, RunResult, make_result, scale_trace, skipped_steps

from .compat import mx

LEARNING_RATE = 1e-2


def make_network(seed: int, context: mx.Context) -> mx.gluon.HybridBlock:
    """Return a small convolutional network for images of shape (N, 1, 8, 8); MXNet's random state stays as it is."""
    network = mx.gluon.nn.HybridSequential()
    network.add(
        mx.gluon.nn.Conv2D(16, 3, padding=1, in_channels=1, activation="relu"),
        mx.gluon.nn.MaxPool2D(2),
        mx.gluon.nn.Conv2D(32, 3, in_channels=16, activation="relu"),
        mx.gluon.nn.Flatten(),
        mx.gluon.nn.Dense(10, in_units=128),
    )
    network.initialize(mx.init.Zero(), ctx=context)
    generator = np.random.default_rng(seed)
    fan_in = 1
    for parameter in network.collect_params().values():
        # The bias of a layer comes after its weight, and has the weight's bound.
        fan_in = math.prod(parameter.shape[1:]) if len(parameter.shape) > 1 else fan_in
        bound = 1 / math.sqrt(fan_in)
        parameter.set_data(mx.nd.array(generator.uniform(-bound, bound, parameter.shape), dtype="float32"))
    network.hybridize()
    return network


class MxnetTrainer:
    """Trains on the best device of this machine.

    A float32 run with a loss scale computes in float32 and scales for real.
    """

    def train(self, data: Digits, run: Run, on_step: Callable[[], None]) -> RunResult:
        """Train and test; see `ampx.cli.demo.Trainer`.

        Sync: one after the first step and one after each epoch; none at each step beyond the trainer's own.
        """
        enabled = run.dtype != "float32" or run.loss_scale is not None
        with ampx.init("mxnet", dtype=run.dtype, enabled=enabled) as amp:
            return _train(data, run, on_step, amp)


def _train(data: Digits, run: Run, on_step: Callable[[], None], amp: ampx.Amp) -> RunResult:
    context = mx.gpu(0) if amp.effective.device.startswith("gpu") else mx.cpu()
    images, labels, test_images, test_labels = (mx.nd.array(part, ctx=context, dtype=part.dtype) for part in data)
    network = make_network(run.seed, context)
    raw = mx.gluon.Trainer(network.collect_params(), "adam", {"learning_rate": LEARNING_RATE})
    trainer = ampx.wrap_optimizer(raw, loss_scale=run.loss_scale)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    init_scale = trainer.loss_scale
    events: list[ampx.Event] = []
    amp.on_event(events.append)
    shuffle = np.random.default_rng(run.seed)

    losses: list[Any] = []
    marks: list[tuple[int, float]] = []  # (steps done, time); from the first step on, which warms up
    for epoch in range(run.epochs):
        trainer.set_learning_rate(LEARNING_RATE * (1 + math.cos(math.pi * epoch / run.epochs)) / 2)
        order = shuffle.permutation(len(images))
        for start in range(0, len(order) - run.batch_size + 1, run.batch_size):
            batch = mx.nd.array(order[start : start + run.batch_size], ctx=context, dtype="int32")
            with mx.autograd.record():
                loss = loss_function(network(images[batch]), labels[batch]).mean()
                losses.append(loss.detach())
                if len(losses) - 1 == run.overflow_at:
                    loss = loss * math.inf
                with ampx.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
            trainer.step(1)  # the loss is a mean already
            on_step()
            if len(losses) == 1:
                marks.append(_mark(losses))
        marks.append(_mark(losses))
    trace = [float(one.asscalar()) for one in losses]
    right = network(test_images).astype("float32").argmax(1).astype("int64") == test_labels
    return make_result(
        run,
        amp.effective,
        accuracy=float(right.astype("float32").mean().asscalar()),
        losses=trace,
        marks=marks,
        scales=scale_trace(init_scale, events, len(trace)),
        skipped=skipped_steps(events),
        final_scale=trainer.loss_scale,
    )


def _mark(losses: list[Any]) -> tuple[int, float]:
    losses[-1].wait_to_read()  # wait for the device
    mx.nd.waitall()
    return len(losses), time.perf_counter()
