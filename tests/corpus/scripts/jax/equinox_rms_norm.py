"""An RMSNorm by hand behind a layer of Equinox, which multiplies x by x in float16: 300 times 300 is beyond 65504."""

import json
import sys

import equinox
import jax
import jax.numpy as jnp
import optax


class RMSNorm(equinox.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x * jax.lax.rsqrt(jnp.mean(x * x) + 1e-6)


class Network(equinox.Module):
    first: equinox.nn.Linear
    norm: RMSNorm
    second: equinox.nn.Linear

    def __call__(self, x):
        return self.second(self.norm(self.first(x)))


keys = jax.random.split(jax.random.key(0), 3)
first, second = equinox.nn.Linear(8, 16, use_bias=False, key=keys[0]), equinox.nn.Linear(16, 1, key=keys[1])
model = Network(first, RMSNorm(jnp.ones(16)), second)
inputs = jax.random.normal(keys[2], (16, 8)) * (10.0 if "--twin" in sys.argv else 1000.0)
targets = jnp.sign(inputs[:, :1])
optimizer = optax.adam(1e-2)
state = optimizer.init(equinox.filter(model, equinox.is_inexact_array))


@equinox.filter_jit
def step(model, state):
    def loss_of(model):
        return jnp.mean((jax.vmap(model)(inputs) - targets) ** 2)

    loss, gradients = equinox.filter_value_and_grad(loss_of)(model)
    updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_inexact_array))
    return equinox.apply_updates(model, updates), state, loss


losses = []
for _ in range(8):
    model, state, loss = step(model, state)
    losses.append(float(loss))
print(json.dumps(losses))
