"""A GELU by hand in Equinox: at 300 the output is right in float16, and the slope of the cube, 3 x^2, is beyond 65504.

In the twin it is at 100, of which the cube is infinite and the slope is not, and no harm is done.
"""

import json
import sys

import equinox
import jax
import jax.numpy as jnp
import optax


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + x * x * x * 0.045)))


keys = jax.random.split(jax.random.key(0), 3)
model = equinox.nn.Sequential(
    [
        equinox.nn.Linear(8, 16, use_bias=False, key=keys[0]),
        equinox.nn.Lambda(gelu),
        equinox.nn.Linear(16, 1, use_bias=False, key=keys[1]),
    ]
)
inputs = jax.random.normal(keys[2], (16, 8)).at[0].set(0.0)
inputs = inputs.at[0, 0].set(200.0 if "--twin" in sys.argv else 1500.0)
targets = jnp.sign(inputs[:, :1])
optimizer = optax.adam(1e-3)
state = optimizer.init(equinox.filter(model, equinox.is_inexact_array))


@equinox.filter_jit
def step(model, state):
    def loss_of(model):
        return optax.huber_loss(jax.vmap(model)(inputs), targets).mean()

    loss, gradients = equinox.filter_value_and_grad(loss_of)(model)
    updates, state = optimizer.update(gradients, state, equinox.filter(model, equinox.is_inexact_array))
    return equinox.apply_updates(model, updates), state, loss


losses = []
for _ in range(8):
    model, state, loss = step(model, state)
    losses.append(float(loss))
print(json.dumps(losses))
