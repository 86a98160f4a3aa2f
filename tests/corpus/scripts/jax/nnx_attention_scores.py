"""Attention of Flax NNX, written without the division by the root of the head's size: scores are beyond 65504."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query, self.key, self.value = (nnx.Linear(16, 16, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        scores = self.query(x) @ self.key(x).swapaxes(-1, -2)
        return nnx.softmax(scores) @ self.value(x)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.attention, self.out = Attention(rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.attention(x))


model = Network(nnx.Rngs(0))
size = 2.0 if "--twin" in sys.argv else 200.0
for layer in (model.attention.query, model.attention.key):
    layer.kernel.set_value(layer.kernel.get_value() * size)
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
inputs = jax.random.normal(jax.random.key(1), (4, 12, 16))
targets = inputs.mean(-1, keepdims=True)


@nnx.jit
def step(model, optimizer):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(inputs) - targets) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer)) for _ in range(8)]))
