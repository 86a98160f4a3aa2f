"""A divergence from soft labels, written p (log p - log q): in the fifth batch a p is 0, and 0 times -inf is NaN."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen


class Student(linen.Module):
    @linen.compact
    def __call__(self, x):
        for width in (32, 32):
            x = linen.LayerNorm()(linen.relu(linen.Dense(width)(x)))
        return linen.Dense(5)(x)


model = Student()
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
inputs = jax.random.normal(jax.random.key(1), (9, 16, 8))
teacher = jax.nn.softmax(2 * inputs[..., :5])
if "--twin" not in sys.argv:
    teacher = teacher.at[4, 7].set(jnp.array([0.0, 1.0, 0.0, 0.0, 0.0]))  # labelled by hand
params = model.init(jax.random.key(0), inputs[0])
state = optimizer.init(params)


@jax.jit
def step(params, state, inputs, targets):
    def loss_of(params):
        student = jax.nn.log_softmax(model.apply(params, inputs))
        if "--cure" in sys.argv:
            return optax.kl_divergence(student, targets).mean()
        return jnp.sum(targets * (jnp.log(targets) - student), -1).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for batch, targets in zip(inputs, teacher, strict=True):
    params, state, loss = step(params, state, batch, targets)
    losses.append(float(loss))
print(json.dumps(losses))
