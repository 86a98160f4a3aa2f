"""The trainer behind `ampx demo --framework jax`: an ordinary training script with the names of ampx."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

import ampx
import ampx_jax
from ampx.cli.demo import Digits, DigitsTrainer, History, Run

Parameters = dict[str, Any]


def make_parameters(key: Any) -> Parameters:
    """Return the float32 parameters of a small convolutional network, drawn as torch draws them."""
    shapes = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "dense": (128, 10)}
    parameters: Parameters = {}
    for name, key_of_layer in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        shape = shapes[name]
        inputs, outputs = (shape[0], shape[1]) if len(shape) == 2 else (math.prod(shape[1:]), shape[0])
        bound = inputs**-0.5
        kernel, bias = jax.random.split(key_of_layer)
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


class JaxTrainer(DigitsTrainer):
    """Trains on the best device of this machine."""

    framework: ClassVar[str] = "jax"

    def start(self, data: Digits, run: Run, amp: ampx.Amp) -> None:
        self.amp = amp
        self.results: list[Any] = []
        images, labels, self.test_images, self.test_labels = (jnp.asarray(part) for part in data)
        self.parameters = make_parameters(jax.random.key(run.seed))
        # AdamW without its last part, the learning rate, which the step gets
        raw = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2))
        tx = ampx.wrap_optimizer(raw, loss_scale=run.loss_scale)
        self.state = tx.init(self.parameters)
        self.network = network = ampx_jax.autocast(apply_network)

        @jax.jit
        def step(parameters: Parameters, state: Any, rows: Any, factor: Any, rate: Any) -> tuple[Any, Any, Any, Any]:
            def scaled_loss(parameters: Parameters) -> tuple[Any, Any]:
                logits = network(parameters, images[rows])
                loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()
                with ampx.scale_loss(loss * factor, state) as scaled:
                    return scaled, loss

            gradients, loss = jax.grad(scaled_loss, has_aux=True)(parameters)
            updates, after = tx.update(gradients, state, parameters)
            updates = jax.tree.map(lambda update: -rate * update, updates)
            return optax.apply_updates(parameters, updates), after, loss, ampx.last_step(after)

        self.compiled = step

    def set_learning_rate(self, rate: float) -> None:
        self.rate = rate

    def step(self, rows: Any, factor: float) -> Any:
        self.parameters, self.state, loss, result = self.compiled(self.parameters, self.state, rows, factor, self.rate)
        self.results.append(result)
        return loss

    def accuracy(self) -> float:
        return float((self.network(self.parameters, self.test_images).argmax(1) == self.test_labels).mean())

    def history(self, steps: int) -> History:
        results, last = jax.device_get(self.results), self.amp.observe(self.state)
        skipped = [number for number, result in enumerate(results) if not result.applied]
        return History([float(result.scale) for result in results], skipped, 1.0 if last is None else last.next_scale)
