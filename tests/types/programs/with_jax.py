"""A JAX script. A line with `# error` must be an error; every other line must be none."""

import jax
import jax.numpy as jnp
import optax
from typing_extensions import assert_type

import ampx

ampx.init("jax", dtype=jnp.float16)
optimizer = ampx.wrap_optimizer(optax.adam(0.1), max_grad_norm=1.0)
parameters = {"w": jnp.ones((4, 1))}
state = optimizer.init(parameters)


def loss_of(parameters: dict[str, jax.Array], state: optax.OptState) -> jax.Array:
    """Return the scaled loss."""
    loss = jnp.mean(jnp.ones((2, 4)) @ parameters["w"])
    with ampx.scale_loss(loss, state) as scaled:
        assert_type(scaled, jax.Array)
        return scaled


def accepts(transformation: optax.GradientTransformation) -> None:
    """Take the wrapped transformation as the native one."""


accepts(optimizer)
updates, state = optimizer.update(jax.grad(loss_of)(parameters, state), state, parameters)
parameters = optax.apply_updates(parameters, updates)
assert_type(ampx.last_step(state), ampx.StepResult | None)
ampx.wrap_optimizer(0.1)  # error: no optimizer
ampx.init("jax", dtype="half precision")  # error: no dtype
