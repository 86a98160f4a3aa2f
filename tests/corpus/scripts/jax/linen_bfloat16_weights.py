"""Flax Linen with weights in bfloat16 and AdamW at a rate of 1e-5: updates of the weights are rounded away."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen

STORED = jnp.float32 if {"--twin", "--cure"} & {*sys.argv} else jnp.bfloat16


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = jax.nn.gelu(linen.Dense(32, name="up", param_dtype=STORED)(x))
        return linen.Dense(4, name="down", param_dtype=STORED)(hidden)


model, optimizer = Network(), optax.adamw(1e-5, weight_decay=0.0)
inputs, labels = jax.random.normal(jax.random.key(1), (64, 16)), jnp.arange(64) % 4
params = model.init(jax.random.key(0), inputs)
state = optimizer.init(params)


@jax.jit
def step(params, state):
    def loss_of(params):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, inputs), labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(30):
    params, state, loss = step(params, state)
    losses.append(float(loss))
print(json.dumps(losses))
