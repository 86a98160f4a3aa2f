"""The trainer behind `ampx demo --framework tensorflow`: an ordinary training script with three names of ampx."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ampx
from ampx.cli.demo import Digits, Run, RunResult, make_result

LEARNING_RATE = 1e-2


def make_network(seed: int) -> keras.Model:
    """Return a small convolutional network for images of shape (N, 8, 8, 1); its logits are float32."""
    seeds = iter(range(3 * seed, 3 * seed + 3))

    def initializer() -> Any:
        return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform", seed=next(seeds))

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu", kernel_initializer=initializer()),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(32, 3, activation="relu", kernel_initializer=initializer()),
            keras.layers.Flatten(),
            keras.layers.Dense(10, kernel_initializer=initializer()),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )


class KerasTrainer:
    """Trains on the best device of this machine.

    A float32 run with a loss scale computes in float32 and scales for real.
    """

    def train(self, data: Digits, run: Run, on_step: Callable[[], None]) -> RunResult:
        """Train and test; see `ampx.cli.demo.Trainer`.

        Sync: one after the first step and one after each epoch.
        """
        enabled = run.dtype != "float32" or run.loss_scale is not None
        with ampx.init("tensorflow", dtype=run.dtype, enabled=enabled) as amp:
            return _train(data, run, on_step, amp)


def _train(data: Digits, run: Run, on_step: Callable[[], None], amp: ampx.Amp) -> RunResult:
    images, test_images = (tf.constant(part.transpose(0, 2, 3, 1)) for part in (data.train_images, data.test_images))
    labels = tf.constant(data.train_labels)
    model = make_network(run.seed)
    optimizer = ampx.wrap_optimizer(keras.optimizers.AdamW(LEARNING_RATE, weight_decay=1e-2), loss_scale=run.loss_scale)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    events: list[ampx.Event] = []
    amp.on_event(events.append)

    @tf.function
    def step(rows: Any, factor: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            loss = loss_function(tf.gather(labels, rows), model(tf.gather(images, rows), training=True))
            with ampx.scale_loss(loss * factor, optimizer) as scaled:
                pass
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        result = optimizer.last_step
        return loss, result.applied, result.scale

    shuffle = np.random.default_rng(run.seed)
    losses: list[Any] = []
    told: list[Any] = []
    marks: list[tuple[int, float]] = []  # (steps done, time); from the first step on, which traces
    for epoch in range(run.epochs):
        optimizer.learning_rate = LEARNING_RATE * (1 + math.cos(math.pi * epoch / run.epochs)) / 2
        order = shuffle.permutation(len(images))
        for start in range(0, len(order) - run.batch_size + 1, run.batch_size):
            factor = math.inf if len(losses) == run.overflow_at else 1.0
            loss, *result = step(tf.constant(order[start : start + run.batch_size]), tf.constant(factor))
            losses.append(loss)
            told.append(result)
            on_step()
            if len(losses) == 1:
                marks.append(_mark(losses))
        marks.append(_mark(losses))
    trace = [float(loss) for loss in losses]
    right = tf.argmax(model(test_images), 1).numpy() == data.test_labels
    return make_result(
        run,
        amp.effective,
        accuracy=float(right.mean()),
        losses=trace,
        marks=marks,
        scales=[float(scale) for _, scale in told],
        skipped=[number for number, (applied, _) in enumerate(told) if not bool(applied)],
        final_scale=float(optimizer.loss_scale),
    )


def _mark(losses: list[Any]) -> tuple[int, float]:
    losses[-1].numpy()
    return len(losses), time.perf_counter()
