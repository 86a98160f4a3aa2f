"""Two JAX processes on this machine, and one process with pmap: an overflow on one device is skipped by all."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx

WORKER = pathlib.Path(__file__).with_name("multiprocess_worker.py")
START = np.array([1.0, -2.0, 0.5], np.float32)
FINITE = np.array([0.25, -0.5, 1.5], np.float32)


def plain(rows):
    """What optax alone makes of these gradients."""
    tx = optax.sgd(0.25, momentum=0.9)
    params, state, trace = jnp.asarray(START), tx.init(jnp.asarray(START)), []
    for row in rows:
        updates, state = tx.update(jnp.asarray(row), state, params)
        params = optax.apply_updates(params, updates)
        trace.append(np.asarray(params).tolist())
    return trace


@pytest.mark.slow
def test_an_overflow_in_one_of_two_processes_is_skipped_by_both(tmp_path, covers):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment.update(JAX_PLATFORMS="cpu", JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo", GLOO_SOCKET_IFNAME="lo")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w+"))
        ranks = []
        for rank in range(2):
            command = [sys.executable, str(WORKER), str(rank), str(port), str(tmp_path)]
            started = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(started.wait)
            stack.callback(started.kill)
            ranks.append(started)
        for started in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(120)
        output = (tmp_path / "log").read_text()[-3000:]
        assert [started.returncode for started in ranks] == [0, 0], output
    # The gradient is the mean of both rows, 1 and 2 times FINITE; all numbers are short binary fractions.
    first, second, third = plain([FINITE * 1.5] * 3)
    expected = [
        [True, 65536.0, 65536.0, first],
        [False, 65536.0, 32768.0, first],
        [True, 32768.0, 32768.0, second],
        [True, 32768.0, 65536.0, third],
    ]
    for rank in range(2):
        processes, seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert processes == 2
        for row, right in zip(seen, expected, strict=True):
            assert row[:3] == right[:3]
            np.testing.assert_allclose(row[3], right[3], rtol=1e-6)  # one rounding of momentum times 0.9
    covers("distributed", "jax", "cpu/float32/O0")


@pytest.mark.parametrize("overflow", [0, 1])
def test_pmap_agrees_over_its_axis(session, overflow):
    if jax.device_count() < 2:
        pytest.skip("one device only")
    tx = ampx.wrap_optimizer(optax.sgd(0.25, momentum=0.9), axis_name="batch")

    def step(params, state, row):
        def scaled_loss(params):
            with ampx.scale_loss(jnp.sum(params * row), state) as scaled:
                return scaled

        # Not averaged: parameters of their own on each device, and only finiteness is agreed on.
        updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.stack([jnp.asarray(START)] * 2)
    state = jax.pmap(tx.init, axis_name="batch")(params)
    rows = np.stack([FINITE, np.where([False, bool(overflow), False], np.inf, FINITE)]).astype(np.float32)
    after, state = jax.pmap(step, axis_name="batch")(params, state, rows)
    expected = START.tolist() if overflow else plain([FINITE])[0]
    assert after.tolist() == [expected, expected]
    assert ampx.loss_scale(state).tolist() == [32768.0 if overflow else 65536.0] * 2
