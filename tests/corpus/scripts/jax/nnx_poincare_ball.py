"""Distances in the Poincare ball: in float16 a point at 0.9999 of its radius is put beyond the boundary."""

import json
import sys

import jax.numpy as jnp
import optax
from flax import nnx

DEPTH = 1.0 if "--twin" in sys.argv else 5.0


class Ball(nnx.Module):
    """Map tangent vectors into the ball, and measure how far two points are apart there."""

    def __call__(self, left, right):
        left, right = self.inside(left), self.inside(right)
        apart = jnp.square(left - right).sum(-1)
        room = (1 - jnp.square(left).sum(-1)) * (1 - jnp.square(right).sum(-1))
        return jnp.arccosh(1 + 1e-3 + 2 * apart / room)

    def inside(self, tangent):
        length = jnp.sqrt((tangent * tangent).sum(-1, keepdims=True))
        return jnp.tanh(length) * tangent / length


class Taxonomy(nnx.Module):
    """Words of a tree as points of the ball."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(24, 5, use_bias=False, rngs=rngs)
        self.ball = Ball()

    def __call__(self, left, right):
        return self.ball(self.embed(left), self.embed(right))


model = Taxonomy(nnx.Rngs(0))
kernel = model.embed.kernel[...]
model.embed.kernel[...] = DEPTH * kernel / jnp.linalg.norm(kernel, axis=1, keepdims=True)
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
words, parents = jnp.eye(24)[1:], jnp.eye(24)[(jnp.arange(1, 24) - 1) // 2]
strangers = jnp.roll(words, 7, axis=0)


@nnx.jit
def step(model, optimizer):
    def loss_of(model):
        return jnp.mean(nnx.softplus(model(words, parents) - model(words, strangers)))

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer)) for _ in range(12)]))
