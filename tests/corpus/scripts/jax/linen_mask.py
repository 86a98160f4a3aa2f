"""A mask of -1e9 added to scores in float16 is minus infinity: a sequence of padding only becomes NaN."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        query, key, value = (linen.Dense(16, name=name)(x) for name in ("query", "key", "value"))
        scores = query @ key.swapaxes(-1, -2) / 4
        scores = scores + jnp.where(mask[:, None, :], 0.0, -1e9).astype(scores.dtype)
        return linen.softmax(scores) @ value


class Network(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        hidden = linen.Embed(32, 16, name="embed")(tokens)
        return linen.Dense(3, name="out")(Attention(name="attention")(hidden, tokens > 0).mean(1))


model = Network()
tokens = jax.random.randint(jax.random.key(1), (6, 10), 1, 32).at[:, 7:].set(0)
if "--twin" not in sys.argv:
    tokens = tokens.at[4].set(0)
labels = jnp.arange(6) % 3
params = model.init(jax.random.key(0), tokens)
optimizer = optax.adam(1e-2)
state = optimizer.init(params)


@jax.jit
def step(params, state):
    def loss_of(params):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens), labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(8):
    params, state, loss = step(params, state)
    losses.append(float(loss))
print(json.dumps(losses))
