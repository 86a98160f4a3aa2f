"""A neural ODE: Diffrax solves it and differentiates through the solution."""

import json

import diffrax
import equinox
import jax
import jax.numpy as jnp
import optax

field = equinox.nn.MLP(2, 2, 16, 1, key=jax.random.key(0))
optimizer = optax.adam(0.01)
state = optimizer.init(equinox.filter(field, equinox.is_inexact_array))


@equinox.filter_jit
def step(field, state, starts):
    @equinox.filter_value_and_grad
    def loss_of(field):
        def solve(start):
            term = diffrax.ODETerm(lambda time, value, args: field(value))
            steps = diffrax.ConstantStepSize()
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.25, start, stepsize_controller=steps).ys[0]

        return jnp.mean((jax.vmap(solve)(starts) - starts[:, ::-1]) ** 2)

    loss, gradients = loss_of(field)
    updates, state = optimizer.update(gradients, state, equinox.filter(field, equinox.is_inexact_array))
    return equinox.apply_updates(field, updates), state, loss


losses = []
for seed in range(4):
    field, state, loss = step(field, state, jax.random.normal(jax.random.key(seed), (4, 2)))
    losses.append(float(loss))
print(json.dumps(losses))
