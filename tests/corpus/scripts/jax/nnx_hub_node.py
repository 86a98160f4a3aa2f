"""A graph network adds up messages by a product with the adjacency: in the fifth batch an item has 3,000 users."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Messages(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, adjacency, users):
        return adjacency @ nnx.relu(self.linear(users))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.messages, self.norm = Messages(rngs), nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 1, rngs=rngs))

    def __call__(self, adjacency, users):
        return self.head(self.norm(self.messages(adjacency, users)))


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
generator = np.random.default_rng(0)
users = jnp.asarray(generator.gamma(2.0, 15.0, (3000, 8)), "float32")
batches = (generator.random((8, 12, 3000)) < 0.02).astype("float32")
if "--twin" not in sys.argv:
    batches[4, 3] = 1.0


@nnx.jit
def step(model, optimizer, adjacency):
    targets = jnp.cos(jnp.arange(12.0))[:, None]
    loss, gradients = nnx.value_and_grad(lambda model: optax.l2_loss(model(adjacency, users), targets).mean())(model)
    optimizer.update(model, gradients)
    return loss


print(json.dumps([float(step(model, optimizer, adjacency)) for adjacency in batches]))
