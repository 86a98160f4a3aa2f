"""Defects of loss scaling elsewhere in the JAX ecosystem: each shown natively, then right through ampx."""

import jax
import jax.numpy as jnp
import optax
import pytest

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE


def through_ampx(pattern):
    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    params = jnp.zeros(1)
    state, trace = tx.init(params), []
    for overflow in pattern:
        slope = ampx.loss_scale(state) * (jnp.nan if overflow else 1.0)
        updates, state = tx.update(jnp.full(1, slope), state, params)
        params = optax.apply_updates(params, updates)
        trace.append(ampx.loss_scale(state))
    return trace, params


def test_flax_dynamic_scale_grows_one_step_late(session):
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    native, trace = dynamic_scale.DynamicScale(growth_interval=3), []
    for overflow in REFERENCE_PATTERN:
        slope = jnp.nan if overflow else 1.0
        native = native.value_and_grad(lambda p, slope=slope: jnp.sum(p * slope))(jnp.ones(2))[0]
        trace.append(float(native.scale))
    assert trace[2] == 65536.0  # the third finite step in a row should have grown it
    assert trace[3] == 32768.0

    assert through_ampx(REFERENCE_PATTERN)[0] == list(REFERENCE_TRACE)


def test_flax_state_continues_as_in_flax(session):
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    native = dynamic_scale.DynamicScale(growth_interval=2, fin_steps=1, scale=256.0)
    saved = ampx.import_state(
        {"scale": 256.0, "fin_steps": 1, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    )
    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    state = session.load_state_dict(saved, tx.init(jnp.zeros(1)))
    for overflow in (0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0):
        slope = jnp.nan if overflow else 1.0
        native = native.value_and_grad(lambda p, slope=slope: jnp.sum(p * slope))(jnp.ones(1))[0]
        _, state = tx.update(jnp.full(1, slope * ampx.loss_scale(state)), state, jnp.zeros(1))
        assert ampx.loss_scale(state) == float(native.scale)


def test_apply_if_finite_applies_nan_in_the_end(session):
    tx = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)
    params = jnp.zeros(1)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jnp.full(1, jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    assert jnp.isnan(params).all()

    assert through_ampx([1] * 60)[1].tolist() == [0.0]


def test_a_scale_on_the_python_side_is_baked_into_compiled_code(session):
    class Holder:
        scale = 65536.0

    compiled = jax.jit(jax.grad(lambda p: jnp.sum(p) * Holder.scale))
    before = compiled(jnp.ones(1))
    Holder.scale = 1.0
    assert compiled(jnp.ones(1)).tolist() == before.tolist() == [65536.0]

    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    state = tx.init(jnp.zeros(1))

    @jax.jit
    def gradient(params, state):
        def scaled_loss(params):
            with ampx.scale_loss(jnp.sum(params), state) as scaled:
                return scaled

        return jax.grad(scaled_loss)(params)

    assert gradient(jnp.ones(1), state).tolist() == [65536.0]
    _, state = tx.update(jnp.full(1, jnp.inf), state, jnp.zeros(1))
    assert gradient(jnp.ones(1), state).tolist() == [32768.0]
