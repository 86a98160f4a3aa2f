"""Logs where the optimizer state is a value: the script hands it over, and it is read every so many calls."""

import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import ampx

PATTERN = [step in (2, 3, 7) for step in range(1, 13)]
SLOPES = jnp.array([math.inf if overflow else 3.0 for overflow in PATTERN])


def training(session, **options):
    tx = session.wrap_optimizer(optax.sgd(0.01), **options)
    params = jnp.ones(2)

    @jax.jit
    def step(params, state, slope):
        def loss_of(params):
            with session.scale_loss(jnp.sum(params) * slope, state) as scaled:
                return scaled

        updates, state = tx.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step, params, tx.init(params)


def test_the_state_is_read_every_so_many_calls(session):
    step, params, state = training(session, max_grad_norm=math.inf)
    drawn, reads = [], []
    log = ampx.log_to(lambda values, step: drawn.append((step, values)), every=4)
    observe = session.observe
    session.observe = lambda state: (reads.append(1), observe(state))
    for slope in SLOPES:
        params, state = step(params, state, slope)
        log.observe(state)
    log.close()
    assert len(reads) == 3
    # 2^16, halved in steps 2, 3 and 7, doubled after every third finite step: 6, 10.
    rows = [(step, row["ampx/loss_scale"], row["ampx/skipped_steps"], row["ampx/skipped_share"]) for step, row in drawn]
    assert rows == [(4, 2.0**14, 2, 0.5), (8, 2.0**14, 3, 0.25), (12, 2.0**15, 3, 0.0)]
    assert [row["ampx/grad_norm"] for _, row in drawn] == pytest.approx([3.0 * math.sqrt(2)] * 3, rel=1e-3)


def test_no_skipped_step_is_missed_in_a_loop_that_is_compiled_whole(session):
    step, params, state = training(session)
    drawn = []
    with ampx.log_to(lambda values, step: drawn.append((step, values["ampx/skipped_steps"])), every=1) as log:

        @jax.jit
        def epoch(params, state):
            return jax.lax.scan(lambda carry, slope: (step(*carry, slope), None), (params, state), SLOPES)[0]

        _, state = epoch(params, state)
        log.observe(state)
    assert drawn == [(12, 3)]


def test_several_states_are_handed_over_together(session, tmp_path):
    trainings = [training(session) for _ in range(2)]
    with ampx.log_to(tmp_path / "run.jsonl", every=2) as log:
        states = [state for _, _, state in trainings]
        for slope in SLOPES[:4]:
            states = [step(params, state, slope)[1] for (step, params, _), state in zip(trainings, states, strict=True)]
            log.observe(*states)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["group"], line["step"]) for line in lines if line["event"] == "Progress"] == [
        (0, 2),
        (1, 2),
        (0, 4),
        (1, 4),
    ]
