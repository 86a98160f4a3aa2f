"""A Ctrl-C or a signal handler's time-out at any line of ampx: the same step again gives what it gives undisturbed.

In JAX a step is a function of values, so an interrupted one has changed nothing. What could be left half done is on the
host: the session, the regions, flax's objects, and what `ampx run` knows of the script.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx
import ampx_jax
from ampx.backend import offer
from ampx.run import Automation, Run, RunSettings
from ampx.session import sessions
from ampx_jax import casting
from interruptions import interrupted_everywhere, sampled

PACKAGES = ("ampx", "ampx_jax")
START = jnp.array([[1.0, -2.0], [0.5, 0.25]])
INPUTS = jnp.array([[1.0, 2.0], [-1.0, 0.5], [0.25, 4.0]])

pytestmark = pytest.mark.usefixtures("nothing_of_its_own", "quiet_end")


def init(dtype="float16"):
    return ampx.init("jax", dtype=dtype, device="cpu", loss_scale=1024.0)


class Training:
    """A function that takes one step of plain values, and the values before and after it."""

    def __init__(self, tx, compiled):
        self.tx, self.state = tx, tx.init(START)
        self.step = jax.jit(self._step) if compiled else self._step
        self.after = None

    def _step(self, weights, state):
        def scaled_loss(weights):
            with ampx.autocast(enabled=True, dtype="float16"):
                outputs = ampx_jax.autocast(lambda x, w: jnp.tanh(x @ w))(INPUTS, weights)
            with ampx.scale_loss(jnp.sum(outputs), state) as scaled:
                return scaled

        updates, state = self.tx.update(jax.grad(scaled_loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    def go_on(self):
        self.after = self.step(START, self.state)


def same(left, right):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_after_an_interruption_is_that_without_one(compiled):
    amp = init()
    tx = ampx.wrap_optimizer(optax.sgd(0.5, momentum=0.5), max_grad_norm=1e6)
    expected = Training(tx, compiled)
    expected.go_on()
    plan = casting.active.value
    count = 0
    for training, place in interrupted_everywhere(
        lambda: Training(tx, compiled), Training.go_on, PACKAGES, **sampled(97, 1 + compiled)
    ):
        count += 1
        assert casting.active.value is plan, place
        training.go_on()
        assert same(training.after, expected.after), place
        assert amp.observe(training.after[1]).applied
    assert count > 3


def test_an_interrupted_change_of_sessions_leaves_one_of_them_or_none():
    exact = jnp.tanh(INPUTS @ START)
    model = ampx_jax.autocast(lambda x, w: jnp.tanh(x @ w))
    low = {}
    for dtype in ("float16", "bfloat16"):
        with init(dtype):
            low[dtype] = model(INPUTS, START)
    assert not np.array_equal(low["float16"], low["bfloat16"])
    count = 0
    for act in (init, lambda _: ampx.shutdown()):
        for _, place in interrupted_everywhere(lambda: init("bfloat16").effective.dtype and "float16", act, PACKAGES):
            count += 1
            session = sessions.get("jax")
            values = model(INPUTS, START)
            choices = [exact] if session is None else [exact, low[session.effective.dtype]]
            assert any(np.array_equal(values, choice) for choice in choices), place
            ampx.shutdown()
            assert sessions.get("jax") is None
            assert casting.active.value is None, place
            init("float16")
            assert np.array_equal(model(INPUTS, START), low["float16"]), place
            ampx.shutdown()
            assert np.array_equal(model(INPUTS, START), exact), place
    assert count > 20


def test_objects_of_flax_change_once_or_not_at_all():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    init()
    model = ampx_jax.autocast(lambda module, x: module(x))

    def start():
        return nnx.BatchNorm(2, momentum=0.5, use_fast_variance=False, rngs=nnx.Rngs(0))

    mean = np.asarray(INPUTS.mean(axis=0))
    for module, place in interrupted_everywhere(start, lambda module: model(module, INPUTS), PACKAGES, **sampled(53)):
        before = np.asarray(module.mean[...])
        assert np.allclose(before, 0.0) or np.allclose(before, mean / 2), place
        model(module, INPUTS)
        np.testing.assert_allclose(module.mean[...], before / 2 + mean / 2, rtol=1e-6)


class Script:
    """What a script under `ampx run` does, which goes on after a Ctrl-C; `by` says how it gets gradients and steps."""

    def __init__(self, by):
        self.run = Run("jax", RunSettings(dtype="float16", device="cpu"))
        self.region = offer(ampx_jax.load(), Automation).automate(self.run)
        self.region.__enter__()
        self.tx = optax.sgd(0.5, momentum=0.5)
        self.weights, self.state = START, self.tx.init(START)

        def step(weights, state, factor):
            if by == "hand":
                grads = jnp.full((2, 2), factor) * INPUTS.sum(axis=0)[:, None]
            else:
                grads = jax.grad(lambda weights: jnp.sum(INPUTS @ weights) * factor)(weights)
            updates, state = self.tx.update(grads, state, weights)
            return optax.apply_updates(weights, updates), state

        self.step = jax.jit(step) if by == "jit" else step
        self.done = [] if by == "jit" else [0.5]  # once compiled it runs no line of Python
        for factor in self.done:
            self.go_on(factor)

    def go_on(self, factor=0.25):
        self.weights, self.state = self.step(self.weights, self.state, factor)
        jax.effects_barrier()

    def close(self):
        self.region.__exit__(None, None, None)


def plainly(*factors):
    """Momentum by hand; the gradient is linear, and exact in both dtypes."""
    weights, speed = np.asarray(START, np.float64), 0.0
    for factor in factors:
        speed = 0.5 * speed + factor * np.asarray(INPUTS, np.float64).sum(axis=0)[:, None]
        weights = weights - 0.5 * speed
    return weights


@pytest.mark.parametrize(("by", "stride"), [("hand", 13), ("grad", 89), ("jit", 89)])
def test_an_unedited_script_goes_on_after_an_interruption(by, stride):
    count, scripts = 0, []

    def start():
        if scripts:
            scripts[-1].close()
        scripts.append(Script(by))
        return scripts[-1]

    for script, place in interrupted_everywhere(start, Script.go_on, PACKAGES, **sampled(stride)):
        count += 1
        done = script.done
        if not np.array_equal(script.weights, plainly(*done)):
            done = [*done, 0.25]
        assert np.array_equal(script.weights, plainly(*done)), place
        script.go_on(float("inf"))
        assert np.array_equal(script.weights, plainly(*done)), f"an overflow was applied after {place}"
        script.go_on(0.125)
        script.go_on(0.5)
        assert np.array_equal(script.weights, plainly(*done, 0.125, 0.5)), place
    scripts[-1].close()
    assert count > 3
    for script in scripts[:-1]:  # each but the last was interrupted
        (record,) = script.run.recorder.optimizers.values()
        assert len(record.skipped) == 1
        # An interrupted step may have been counted when the script did not get its result, or not yet.
        assert record.steps - len(script.done) - 3 in (0, 1)
