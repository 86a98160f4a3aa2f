"""A layer that is the solution of an equation, which Optimistix finds and differentiates implicitly."""

import json

import jax
import jax.numpy as jnp
import optax
import optimistix

keys = jax.random.split(jax.random.key(0), 2)
params = {"in": jax.random.normal(keys[0], (4, 4)) / 4, "out": jax.random.normal(keys[1], (4, 1)) / 2}
optimizer = optax.adam(0.01)
state = optimizer.init(params)


@jax.jit
def step(params, state, inputs):
    def loss_of(params):
        def balance(value, inputs):
            return jnp.tanh(value @ params["in"] + inputs)

        solver = optimistix.FixedPointIteration(rtol=1e-3, atol=1e-3)
        fixed = optimistix.fixed_point(balance, solver, jnp.zeros(4), inputs, throw=False).value
        return ((fixed @ params["out"] - inputs.mean()) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


losses = []
for seed in range(4):
    params, state, loss = step(params, state, jax.random.normal(jax.random.key(seed), (4,)))
    losses.append(float(loss))
print(json.dumps(losses))
