"""Sinkhorn on exp(-cost / epsilon): of a point far from all others the whole row is 0 in float16, and is divided by."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

EPSILON = 0.5 if "--twin" in sys.argv else 0.1


class Sinkhorn(nnx.Module):
    """The transport between two sets of equal weights, and what it costs."""

    def __call__(self, cost):
        left, right = jnp.full(cost.shape[0], 1 / cost.shape[0]), jnp.full(cost.shape[1], 1 / cost.shape[1])
        kernel, scales = jnp.exp(-cost / EPSILON), jnp.ones(cost.shape[1])
        for _ in range(10):
            weights = left / (kernel @ scales)
            scales = right / (kernel.T @ weights)
        return weights[:, None] * kernel * scales


class Matcher(nnx.Module):
    """Move points to where others are."""

    def __init__(self, rngs):
        self.hidden, self.shift = nnx.Linear(2, 32, rngs=rngs), nnx.Linear(32, 2, rngs=rngs)
        self.transport = Sinkhorn()

    def __call__(self, points, others):
        moved = points + 0.1 * self.shift(nnx.tanh(self.hidden(points)))
        cost = jnp.square(moved[:, None] - others).sum(-1)
        return jnp.sum(self.transport(cost) * cost)


model = Matcher(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
points = jax.random.uniform(jax.random.key(1), (16, 2))
others = jax.random.uniform(jax.random.key(2), (16, 2)) * 0.8
points = points.at[5].set(jnp.array([2.1, 1.9]))  # far from all


@nnx.jit
def step(model, optimizer):
    loss, gradients = nnx.value_and_grad(lambda model: model(points, others))(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer)) for _ in range(12)]))
