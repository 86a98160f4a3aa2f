"""A metric that its author cast to float16 by hand, squares included: casting decides nothing there."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen

DTYPE = jnp.float32 if {"--twin", "--cure"} & {*sys.argv} else jnp.float16


class Similarity(linen.Module):
    """The cosine of the angle between two outputs."""

    def __call__(self, x, y):
        x, y = x.astype(DTYPE), y.astype(DTYPE)
        return (x * y).sum(-1) / jnp.sqrt((x * x).sum(-1) * (y * y).sum(-1))


class Network(linen.Module):
    @linen.compact
    def __call__(self, x, y):
        dense = linen.Dense(16, name="dense")
        return Similarity(name="similarity")(dense(x), dense(y))


model = Network()
x, y = (jax.random.normal(jax.random.key(seed), (16, 8)) * 100 for seed in (1, 2))
params = model.init(jax.random.key(0), x, y)
optimizer = optax.adam(1e-3)
state = optimizer.init(params)


@jax.jit
def step(params, state):
    loss, gradients = jax.value_and_grad(lambda params: model.apply(params, x, y).astype(jnp.float32).mean())(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(8):
    params, state, loss = step(params, state)
    losses.append(float(loss))
print(json.dumps(losses))
