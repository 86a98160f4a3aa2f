"""Rotary angles as a product of positions and frequencies, which casting computes in bfloat16: late ones are wrong."""

import json
import sys

import jax.numpy as jnp
import optax
from flax import nnx


class Rotary(nnx.Module):
    def __init__(self, size):
        self.frequencies = 100.0 ** -(jnp.arange(0, size, 2) / size)

    def __call__(self, positions):
        if "--twin" in sys.argv:
            angles = positions[:, None] * self.frequencies
        else:
            angles = jnp.einsum("i,j->ij", positions, self.frequencies)
        return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.rotary, self.hidden, self.out = Rotary(8), nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, positions):
        return self.out(nnx.tanh(self.hidden(self.rotary(positions))))


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
positions = jnp.arange(900.0, 1100.0)
targets = 3 * jnp.cos(positions)[:, None]


@nnx.jit
def step(model, optimizer):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(positions) - targets) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer)) for _ in range(20)]))
