"""Distances to codes, expanded as |z|^2 - 2 z e + |e|^2: the product in bfloat16 has lost the difference of codes."""

import json
import sys

import equinox
import jax
import jax.numpy as jnp
import optax


class Quantizer(equinox.Module):
    codes: jax.Array

    def __call__(self, z):
        distances = (z**2).sum(-1, keepdims=True) - 2 * z @ self.codes.T + (self.codes**2).sum(-1)
        return self.codes[distances.argmin(-1)]


class Network(equinox.Module):
    encoder: equinox.nn.Linear
    quantizer: Quantizer

    def __call__(self, x):
        z = jax.vmap(self.encoder)(x)
        return z, self.quantizer(z)


keys = jax.random.split(jax.random.key(0), 3)
offset = 0.0 if "--twin" in sys.argv else 20.0
encoder = equinox.nn.Linear(8, 8, key=keys[0])
encoder = equinox.tree_at(lambda layer: layer.bias, encoder, encoder.bias + offset)
model = Network(encoder, Quantizer(jax.random.normal(keys[1], (64, 8)) + offset))
inputs = jax.random.normal(keys[2], (32, 8)) * 2
optimizer = optax.sgd(1e-3)
state = optimizer.init(equinox.filter(model, equinox.is_inexact_array))


@equinox.filter_jit
def step(model, state):
    def loss_of(model):
        z, nearest = model(inputs)
        return jnp.mean((jax.lax.stop_gradient(nearest) - z) ** 2) + jnp.mean((nearest - jax.lax.stop_gradient(z)) ** 2)

    loss, gradients = equinox.filter_value_and_grad(loss_of)(model)
    updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_inexact_array))
    return equinox.apply_updates(model, updates), state, loss


losses = []
for _ in range(8):
    model, state, loss = step(model, state)
    losses.append(float(loss))
print(json.dumps(losses))
