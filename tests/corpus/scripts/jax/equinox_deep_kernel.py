"""A Gaussian process over learned features: a product in bfloat16 is off by more than the noise on its diagonal."""

import json
import sys

import equinox
import jax
import jax.numpy as jnp
import optax

NOISE = 1.0 if "--twin" in sys.argv else 1e-3
features = equinox.nn.MLP(3, 6, 32, 2, activation=jnp.tanh, key=jax.random.key(0))
inputs = jax.random.normal(jax.random.key(1), (24, 3))
targets = jnp.sin(2 * inputs[:, 0]) + inputs[:, 1] + jnp.sqrt(NOISE) * jax.random.normal(jax.random.key(2), (24,))
optimizer = optax.adam(3e-3)
state = optimizer.init(equinox.filter(features, equinox.is_inexact_array))


@equinox.filter_jit
def step(features, state):
    def loss_of(features):
        rows = jax.vmap(features)(inputs)
        rows = 2.0 * rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
        products = (rows[:, None] * rows).sum(-1) if "--cure" in sys.argv else rows @ rows.T
        factor = jnp.linalg.cholesky(products + NOISE * jnp.eye(24))
        residual = jax.scipy.linalg.solve_triangular(factor, targets, lower=True)
        return jnp.mean(residual**2) / 2 + jnp.mean(jnp.log(jnp.diagonal(factor)))

    loss, gradients = equinox.filter_value_and_grad(loss_of)(features)
    updates, state = optimizer.update(gradients, state)
    return equinox.apply_updates(features, updates), state, loss


losses = []
for _ in range(12):
    features, state, loss = step(features, state)
    losses.append(float(loss))
print(json.dumps(losses))
