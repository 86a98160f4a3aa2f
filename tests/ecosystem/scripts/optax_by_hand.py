"""A step of JAX by hand, with a chain of optax and a schedule."""

import json

import jax
import jax.numpy as jnp
import optax

keys = jax.random.split(jax.random.key(0), 6)
params = {"in": jax.random.normal(keys[0], (8, 16)) / 3, "out": jax.random.normal(keys[1], (16, 1)) / 4}
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, 1, 8)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
state = optimizer.init(params)


@jax.jit
def step(params, state, inputs):
    def loss_of(params):
        hidden = jax.nn.gelu(inputs @ params["in"])
        return jnp.mean((hidden @ params["out"] - inputs.mean(1, keepdims=True)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for key in keys[2:]:
    params, state, loss = step(params, state, jax.random.normal(key, (16, 8)))
    losses.append(float(loss))
print(json.dumps(losses))
