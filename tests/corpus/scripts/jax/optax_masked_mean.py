"""A loss is the mean over words that are no padding, and in the third batch none is left: zero by zero is NaN."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Tagger(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.out = nnx.Embed(32, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, tokens):
        return self.out(nnx.gelu(self.embed(tokens)))


model = Tagger(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
tokens = jax.random.randint(jax.random.key(1), (6, 4, 10), 1, 32).at[:, :, 7:].set(0)
if "--twin" not in sys.argv and "--cure" not in sys.argv:
    tokens = tokens.at[2].set(0)


@nnx.jit
def step(model, optimizer, tokens):
    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens % 4)
        return jnp.sum(losses * (tokens > 0)) / jnp.sum(tokens > 0)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer, batch)) for batch in tokens]))
