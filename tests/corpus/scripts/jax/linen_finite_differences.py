"""A Poisson equation by finite differences of a network: bfloat16 has lost what points 0.02 apart differ by."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen

STEP = 0.02


class Solution(linen.Module):
    """A smooth function on the line."""

    @linen.compact
    def __call__(self, x):
        hidden = linen.tanh(linen.Dense(32, name="hidden")(x))
        hidden = linen.tanh(linen.Dense(32, name="middle")(hidden))
        return linen.Dense(1, name="out")(hidden)[:, 0]


class Poisson(linen.Module):
    def setup(self):
        self.solution = Solution()

    def __call__(self, x, boundary):
        if "--twin" in sys.argv:
            second = jax.vmap(jax.hessian(lambda p: self.solution(p[None])[0]))(x)[:, 0, 0]
        else:
            ahead, behind = self.solution(x + STEP), self.solution(x - STEP)
            second = (ahead - 2 * self.solution(x) + behind) / STEP**2
        return second, self.solution(boundary)


problem, optimizer = Poisson(), optax.adam(3e-3)
points, ends = jnp.linspace(0, 1, 48)[:, None], jnp.array([[0.0], [1.0]])
force = -(jnp.pi**2) * jnp.sin(jnp.pi * points[:, 0])
params = problem.init(jax.random.key(0), points, ends)
state = optimizer.init(params)


@jax.jit
def step(params, state):
    def loss_of(params):
        second, values = problem.apply(params, points, ends)
        return jnp.mean((second - force) ** 2) + 10 * jnp.mean(values**2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(20):
    params, state, loss = step(params, state)
    losses.append(float(loss))
print(json.dumps(losses))
