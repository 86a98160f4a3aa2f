"""A recurrent layer of Flax NNX whose state doubles in every step of its scan: after 20 steps it is beyond 65504."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Network(nnx.Module):
    def __init__(self, rngs):
        cell = nnx.SimpleCell(4, 16, activation_fn=nnx.relu, rngs=rngs)
        gain = 0.5 if "--twin" in sys.argv else 2.0
        cell.dense_h.kernel.value = gain * jnp.eye(16)
        self.rnn, self.norm, self.out = nnx.RNN(cell), nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, words):
        return self.out(self.norm(self.rnn(words, initial_carry=jnp.zeros((8, 16)))[:, -1]))


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(2e-3), wrt=nnx.Param)
words = jax.random.normal(jax.random.key(1), (8, 20, 4))
targets = words[:, 0, :1]


@nnx.jit
def step(model, optimizer):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(words) - targets) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer)) for _ in range(8)]))
