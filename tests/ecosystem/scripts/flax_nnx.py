"""A module of Flax NNX with dropout and batch norm, trained by nnx.Optimizer."""

import json

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, inputs):
        return self.second(nnx.relu(self.norm(self.first(inputs))))


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, inputs):
    def loss_of(model):
        return jnp.mean((model(inputs) - inputs.mean(1, keepdims=True)) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


losses = [float(step(model, optimizer, jax.random.normal(jax.random.key(seed), (16, 8)))) for seed in range(4)]
print(json.dumps(losses))
