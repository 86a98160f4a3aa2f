"""A feed-forward block of Flax Linen whose second layer is beyond 65504, in front of a norm."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState

SIZE = 20.0 if "--twin" in sys.argv else 1e4


class Block(linen.Module):
    @linen.compact
    def __call__(self, inputs):
        hidden = linen.relu(linen.Dense(64, name="up", kernel_init=linen.initializers.normal(10.0))(inputs))
        hidden = linen.Dense(16, name="down", kernel_init=linen.initializers.normal(SIZE))(hidden)
        return linen.Dense(1, name="out")(linen.LayerNorm()(hidden))


model = Block()
inputs = jax.random.normal(jax.random.key(1), (16, 8))
targets = inputs.mean(1, keepdims=True)
state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), inputs), tx=optax.adam(1e-3))


@jax.jit
def step(state):
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean((state.apply_fn(params, inputs) - targets) ** 2))(
        state.params
    )
    return state.apply_gradients(grads=gradients), loss


losses = []
for _ in range(8):
    state, loss = step(state)
    losses.append(float(loss))
print(json.dumps(losses))
