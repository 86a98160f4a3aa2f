"""`update` divides by the loss scale: it refuses gradients of which it can know that nothing was multiplied by it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import ampx

PARAMS = {"w": jnp.array([1.0, -2.0])}


def loss_of(params):
    return jnp.sum(params["w"] * jnp.array([0.25, -0.5]))


def scaled_loss(params, state):
    with ampx.scale_loss(loss_of(params), state) as scaled:
        return scaled


def refused():
    return pytest.raises(ampx.NotScaledError, match="did not go through scale_loss")


@pytest.fixture
def tx(session):
    return ampx.wrap_optimizer(optax.sgd(1.0))


@pytest.mark.parametrize("compiled", ["step", "update", "nothing"])
def test_the_gradients_of_the_plain_loss_are_refused(tx, compiled):
    update = jax.jit(tx.update) if compiled == "update" else tx.update

    def step(params, state):
        return update(jax.grad(loss_of)(params), state, params)

    state = tx.init(PARAMS)
    with refused():
        (jax.jit(step) if compiled == "step" else step)(PARAMS, state)
    # The same transformation and state train, once the loss is scaled.
    updates, state = update(jax.grad(scaled_loss)(PARAMS, state), state, PARAMS)
    assert updates["w"].tolist() == [-0.25, 0.5]
    assert ampx.last_step(state).applied


def test_what_was_traced_elsewhere_and_before_counts(tx):
    """A new transformation with a compiled gradient that is not traced again: JAX takes the states for the same."""
    gradient = jax.jit(jax.grad(scaled_loss))
    state = tx.init(PARAMS)
    jax.eval_shape(gradient, PARAMS, state)
    assert tx.update(gradient(PARAMS, state), state)[0]["w"].tolist() == [-0.25, 0.5]
    with ampx.init("jax", dtype="float16", device="cpu", loss_scale=ampx.LossScale(growth_interval=3)):
        again = ampx.wrap_optimizer(optax.sgd(1.0))
        state = again.init(PARAMS)
        assert jax.jit(again.update)(gradient(PARAMS, state), state)[0]["w"].tolist() == [-0.25, 0.5]
        assert gradient._cache_size() == 1


def test_gradients_from_elsewhere_are_multiplied_by_the_scale_that_is_asked_for(tx):
    """As a step that is lowered before anything is differentiated, or whose gradients another process makes."""
    state, lowered = tx.init(PARAMS), jax.jit(tx.update)
    with refused():
        lowered.lower(PARAMS, state)
    scale = ampx.loss_scale(state)
    updates, _ = lowered.lower(PARAMS, state).compile()({"w": jnp.array([0.25, -0.5]) * scale}, state)
    assert updates["w"].tolist() == [-0.25, 0.5]


def test_a_second_optimizer_is_asked_for_a_scaled_loss_of_its_own(tx):
    state, other = tx.init(PARAMS), {"v": PARAMS["w"]}
    tx.update(jax.grad(scaled_loss)(PARAMS, state), state)
    second = ampx.wrap_optimizer(optax.sgd(1.0))
    with refused():
        second.update(other, second.init(other))


def test_in_several_steps_of_one_function_and_around_accumulation_it_is_known(tx):
    around = optax.MultiSteps(tx, 2)

    def step(state, _):
        return around.update(jax.grad(scaled_loss)(PARAMS, state), state, PARAMS)[::-1]

    _, updates = jax.lax.scan(step, around.init(PARAMS), None, length=2)
    assert updates["w"].tolist() == [[0.0, 0.0], [-0.25, 0.5]]
    plain = optax.MultiSteps(ampx.wrap_optimizer(optax.sgd(1.0)), 2)
    with refused():
        jax.jit(plain.update)({"u": jnp.ones(2)}, plain.init({"u": jnp.ones(2)}))


def test_where_the_scale_is_one_nothing_is_asked(quiet_end):
    for options in ({"dtype": "bfloat16"}, {"dtype": "float16", "loss_scale": 1.0}, {"enabled": False}):
        with ampx.init("jax", device="cpu", **options):
            tx = ampx.wrap_optimizer(optax.sgd(1.0))
            updates, _ = jax.jit(tx.update)(jax.grad(loss_of)(PARAMS), tx.init(PARAMS))
            assert updates["w"].tolist() == [-0.25, 0.5]


def test_a_transformation_in_place_of_its_state_is_named(tx):
    for call in (lambda: ampx.scale_loss(jnp.ones(()), tx), lambda: ampx.last_step(tx)):
        with pytest.raises(ampx.NotWrappedError, match="Pass opt_state in place of tx"):
            call()
