"""A module of Equinox, whose parameters are filtered from what is no array."""

import json

import equinox
import jax
import jax.numpy as jnp
import optax

model = equinox.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))
optimizer = optax.adam(0.01)
state = optimizer.init(equinox.filter(model, equinox.is_inexact_array))


@equinox.filter_jit
def step(model, state, inputs):
    @equinox.filter_value_and_grad
    def loss_of(model):
        return jnp.mean((jax.vmap(model)(inputs) - inputs.mean(1, keepdims=True)) ** 2)

    loss, gradients = loss_of(model)
    updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_inexact_array))
    return equinox.apply_updates(model, updates), state, loss


losses = []
for seed in range(4):
    model, state, loss = step(model, state, jax.random.normal(jax.random.key(seed), (16, 8)))
    losses.append(float(loss))
print(json.dumps(losses))
