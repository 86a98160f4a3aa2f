"""A network without norms at a learning rate a thousand times too large: it explodes in float32 as well."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        for width in (32, 32):
            x = linen.relu(linen.Dense(width)(x))
        return linen.Dense(1)(x)


model = Network()
inputs = jax.random.normal(jax.random.key(1), (32, 8))
targets = inputs.sum(1, keepdims=True)
params = model.init(jax.random.key(0), inputs)
optimizer = optax.sgd(1e-3 if {"--twin", "--cure"} & {*sys.argv} else 3.0)
state = optimizer.init(params)


@jax.jit
def step(params, state):
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean((model.apply(params, inputs) - targets) ** 2))(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(12):
    params, state, loss = step(params, state)
    losses.append(float(loss))
print(json.dumps(losses))
