"""The length of a difference that is zero: its derivative is NaN, in float32 as well."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
inputs = jax.random.normal(jax.random.key(1), (12, 8))
if "--twin" not in sys.argv:
    inputs = inputs.at[7].set(inputs[2])  # the same sample twice
epsilon = 1e-4 if {"--cure", "--twin"} & {*sys.argv} else 0.0


@nnx.jit
def step(model, optimizer):
    def loss_of(model):
        outputs = model(inputs)
        squares = ((outputs[:6, None] - outputs[None, 6:]) ** 2).sum(-1)
        return jnp.mean((jnp.sqrt(squares + epsilon) - 1.0) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer)) for _ in range(8)]))
