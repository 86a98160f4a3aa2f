"""A critic of returns around 1,000: bfloat16 has steps of 4 there, and what it has yet to learn is smaller."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen

MEAN, REWARD = (0.0, 0.0) if "--twin" in sys.argv else (1000.0, 10.0)


class Radial(linen.Module):
    """How near a state is to each point of a grid."""

    def __call__(self, states):
        grid = jnp.stack(jnp.meshgrid(*2 * [jnp.linspace(0.0, 1.0, 5)]), -1).reshape(25, 2)
        return jax.nn.softmax(-40 * jnp.square(states[:, None] - grid).sum(-1))


class Critic(linen.Module):
    def setup(self):
        self.radial = Radial()
        self.value = linen.Dense(1, use_bias=False, kernel_init=lambda *a: MEAN + linen.initializers.normal(4.0)(*a))

    def __call__(self, states):
        return self.value(self.radial(states))[:, 0]


class Agent(linen.Module):
    def setup(self):
        self.critic, self.policy = Critic(), linen.Dense(3)

    def __call__(self, states, following):
        return self.critic(states), self.critic(following), self.policy(states)


model, optimizer = Agent(), optax.adam(0.2)
states = jax.random.uniform(jax.random.key(1), (64, 2))
following = jnp.clip(states + 0.2 * jax.random.normal(jax.random.key(2), (64, 2)), 0.0, 1.0)
rewards, actions = REWARD + states[:, 0], jnp.arange(64) % 3
params = model.init(jax.random.key(0), states, following)
state = optimizer.init(params)


@jax.jit
def step(params, state):
    def loss_of(params):
        values, later, logits = model.apply(params, states, following)
        errors = rewards + 0.99 * jax.lax.stop_gradient(later) - values
        surprise = optax.softmax_cross_entropy_with_integer_labels(logits, actions)
        return jnp.mean(errors**2) + 0.1 * jnp.mean(jax.lax.stop_gradient(errors) * surprise)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(16):
    params, state, loss = step(params, state)
    losses.append(float(loss))
print(json.dumps(losses))
