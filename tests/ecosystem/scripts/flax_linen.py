"""A module of Flax Linen in a TrainState."""

import json

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState


class Network(linen.Module):
    @linen.compact
    def __call__(self, inputs):
        hidden = linen.LayerNorm()(linen.Dense(16)(inputs))
        return linen.Dense(1)(linen.gelu(hidden))


model = Network()
params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(0.01))


@jax.jit
def step(state, inputs):
    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, inputs) - inputs.mean(1, keepdims=True)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


losses = []
for seed in range(4):
    state, loss = step(state, jax.random.normal(jax.random.key(seed), (16, 8)))
    losses.append(float(loss))
print(json.dumps(losses))
