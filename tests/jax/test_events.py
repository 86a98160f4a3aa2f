"""Events come when the host looks."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import ampx


def stepped(tx, state, overflow):
    slope = ampx.loss_scale(state) * (jnp.inf if overflow else 1.0)
    return tx.update(jnp.full(1, slope), state, jnp.zeros(1))[1]


def test_looking_twice_sends_events_once(session):
    seen = []
    session.on_event(seen.append)
    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    state = stepped(tx, tx.init(jnp.zeros(1)), overflow=True)
    assert seen == []
    assert session.observe(state) == session.observe(state) == ampx.StepResult(False, False, 65536.0, 32768.0, 1)
    assert [type(event) for event in seen] == [ampx.StepSkipped, ampx.ScaleChanged]
    assert {(event.framework, event.group, event.step) for event in seen} == {("jax", 0, 1)}


def test_of_several_steps_the_last_one_is_told(session):
    seen = []
    session.on_event(seen.append)
    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    state = tx.init(jnp.zeros(1))
    for overflow in (True, False, True):
        state = stepped(tx, state, overflow)
    session.observe(state)
    assert {event.step for event in seen} == {3}
    assert seen[1].next_scale == 16384.0


def test_a_collapse_warns_when_the_host_looks(session):
    tx = ampx.wrap_optimizer(optax.sgd(1.0), loss_scale=ampx.LossScale(max_consecutive_skips=2))
    state = tx.init(jnp.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = stepped(tx, state, overflow=True)
        session.observe(state)
    with pytest.warns(ampx.ScaleCollapsedWarning, match="2 steps in a row"):
        session.observe(stepped(tx, state, overflow=True))


def test_a_gate_asks_for_the_present_state(session):
    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    state, calls = tx.init(jnp.zeros(1)), []

    class Scheduler:
        def step(self):
            calls.append(1)

    gate = ampx.gate(Scheduler(), lambda: state)
    for overflow in (False, True, False):
        state = stepped(tx, state, overflow)
        gate.step()
    assert len(calls) == 2


def test_a_disabled_session_is_transparent_under_jit():
    with ampx.init("jax", enabled=False) as amp:
        tx = ampx.wrap_optimizer(optax.sgd(1.0))
        state = tx.init(jnp.zeros(1))
        updates, state = jax.jit(tx.update)(jnp.full(1, jnp.inf), state, jnp.zeros(1))
        assert updates.tolist() == [-jnp.inf]
        assert amp.last_step(state) == ampx.StepResult(True, None, 1.0, 1.0, 0)
        assert amp.observe(state).finite is None
        assert amp.state_dict(state)["groups"] == []
