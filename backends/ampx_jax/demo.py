"""The trainer behind `ampx demo --framework jax`: an ordinary training script with the names of ampx."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
import ampx_jax
from ampx.cli.demo import Digits, Run, RunResult, make_result

LEARNING_RATE = 1e-2
Parameters = dict[str, Any]


def make_parameters(key: Any) -> Parameters:
    """Return the parameters of a small convolutional network, drawn as torch draws them.

    Args:
        key: A PRNG key.

    Returns:
        float32 arrays: two kernels of shape (out, in, 3, 3), one matrix of shape (128, 10), and their biases.
    """
    shapes = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "dense": (128, 10)}
    parameters: Parameters = {}
    for name, one in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        shape = shapes[name]
        inputs, outputs = (shape[0], shape[1]) if len(shape) == 2 else (math.prod(shape[1:]), shape[0])
        bound = inputs**-0.5
        kernel, bias = jax.random.split(one)
        parameters[name] = jax.random.uniform(kernel, shape, minval=-bound, maxval=bound)
        parameters[f"{name}_bias"] = jax.random.uniform(bias, (outputs,), minval=-bound, maxval=bound)
    return parameters


def apply_network(parameters: Parameters, images: Any) -> Any:
    """Return logits of shape (N, 10) for images of shape (N, 1, 8, 8)."""

    def convolve(name: str, inputs: Any, padding: str) -> Any:
        outputs = jax.lax.conv(inputs, parameters[name], (1, 1), padding)
        return jax.nn.relu(outputs + parameters[f"{name}_bias"][:, None, None])

    hidden = convolve("conv1", images, "SAME")
    hidden = hidden.reshape(-1, 16, 4, 2, 4, 2).max(axis=(3, 5))
    hidden = convolve("conv2", hidden, "VALID").reshape(len(images), -1)
    return hidden @ parameters["dense"] + parameters["dense_bias"]


class JaxTrainer:
    """Trains on the best device of this machine."""

    def train(self, data: Digits, run: Run, on_step: Callable[[], None]) -> RunResult:
        """Train and test; see `ampx.cli.demo.Trainer`.

        Sync: one after the first step and one after each epoch.
        """
        enabled = run.dtype != "float32"
        with ampx.init("jax", dtype=run.dtype if enabled else "auto", enabled=enabled) as amp:
            return _train(data, run, on_step, amp)


def _train(data: Digits, run: Run, on_step: Callable[[], None], amp: ampx.Amp) -> RunResult:
    images, labels, test_images, test_labels = (jnp.asarray(part) for part in data)
    parameters = make_parameters(jax.random.key(run.seed))
    steps_an_epoch = len(data.train_images) // run.batch_size
    by_epoch = [LEARNING_RATE * (1 + math.cos(math.pi * epoch / run.epochs)) / 2 for epoch in range(run.epochs)]
    rates = jnp.array(by_epoch)
    tx = optax.adamw(lambda step: rates[jnp.minimum(step // steps_an_epoch, run.epochs - 1)], weight_decay=1e-2)
    tx = ampx.wrap_optimizer(tx, loss_scale=run.loss_scale)
    state = tx.init(parameters)
    network = ampx_jax.autocast(apply_network)

    @jax.jit
    def step(parameters: Parameters, state: Any, rows: Any, factor: Any) -> tuple[Parameters, Any, Any, Any]:
        def scaled_loss(parameters: Parameters) -> tuple[Any, Any]:
            logits = network(parameters, images[rows])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()
            with ampx.scale_loss(loss * factor, state) as scaled:
                return scaled, loss

        gradients, loss = jax.grad(scaled_loss, has_aux=True)(parameters)
        updates, after = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), after, loss, ampx.last_step(after)

    random = np.random.default_rng(run.seed)
    losses: list[Any] = []
    results: list[Any] = []
    marks: list[tuple[int, float]] = []  # (steps done, time); from the first step on, which compiles
    for _ in range(run.epochs):
        order = random.permutation(len(data.train_images))
        for first in range(0, steps_an_epoch * run.batch_size, run.batch_size):
            factor = math.inf if len(losses) == run.overflow_at else 1.0
            rows = order[first : first + run.batch_size]
            parameters, state, loss, result = step(parameters, state, rows, factor)
            losses.append(loss)
            results.append(result)
            on_step()
            if len(losses) == 1:
                marks.append(_mark(losses))
        marks.append(_mark(losses))
    trace = [float(loss) for loss in jax.device_get(losses)]
    told = jax.device_get(results)
    right = (network(parameters, test_images).argmax(1) == test_labels).mean()
    last = amp.observe(state)
    return make_result(
        run,
        amp.effective,
        accuracy=float(right),
        losses=trace,
        marks=marks,
        scales=[float(one.scale) for one in told],
        skipped=[number for number, one in enumerate(told) if not one.applied],
        final_scale=1.0 if last is None else last.next_scale,
    )


def _mark(losses: list[Any]) -> tuple[int, float]:
    losses[-1].block_until_ready()
    return len(losses), time.perf_counter()
