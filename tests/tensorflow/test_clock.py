"""What `tune` times in TensorFlow: one traced function, cast as it is told, that leaves everything as it was."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx
from ampx.backend import CastPlan, offer
from ampx.numerics.probe import Probe
from ampx_tensorflow.backend import TensorFlowBackend
from ampx_tensorflow.numerics import replaying

PROBE = offer(TensorFlowBackend(), Probe)
X = np.linspace(-2, 2, 12, dtype="float32").reshape(4, 3)
BFLOAT16 = CastPlan("cpu", "bfloat16")


def layers():
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, name="first"), keras.layers.Dense(2, name="last")]
    )


@pytest.mark.parametrize("plan", [None, BFLOAT16])
def test_a_clock_traces_once_casts_as_planned_and_leaves_everything_as_it_was(plan, monkeypatch):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )
    other = tf.Variable(0.0)  # which is none of the model's
    dtypes = []

    def step(model):
        dtypes.append(model.layers[0](X).dtype.name)
        other.assign_add(1.0)
        return tf.reduce_mean(tf.cast(model(X, training=True), tf.float32) ** 2)

    before = [value.copy() for value in model.get_weights()]
    policies = [layer.dtype_policy for layer in model.layers]
    seeds = model.layers[-1].seed_generator.state.numpy()
    seconds = PROBE.clock(model, step, plan)
    assert seconds() > 0
    with monkeypatch.context() as patch:
        now = iter(range(1000))
        patch.setattr(time, "perf_counter", lambda: next(now))
        # It began at 0, looked at 1 after a step, and ended at 2: two seconds for one step.
        assert seconds() == 2
    assert dtypes == ["float32" if plan is None else "bfloat16"]
    assert all(map(np.array_equal, before, model.get_weights()))
    assert np.array_equal(seeds, model.layers[-1].seed_generator.state.numpy())
    assert float(other) == 0.0
    assert all(a is b.dtype_policy for a, b in zip(policies, model.layers, strict=True))


def test_a_clock_keeps_forced_layers_in_their_dtype_and_follows_no_older_trace():
    model, dtypes = layers(), []

    @tf.function
    def loss_of(x):
        dtypes.append([layer.compute_dtype for layer in model.layers])
        return tf.reduce_sum(tf.cast(model(x), tf.float32))

    loss_of(tf.constant(X))  # in float32, of which the function's cache knows no more than its arguments
    with PROBE.force(model, {"first": "float32"}):
        seconds = PROBE.clock(model, lambda model: loss_of(tf.constant(X)), BFLOAT16)
    with PROBE.force(model, {"first": "float32"}):
        assert seconds() > 0
    assert dtypes == [["float32", "float32"], ["float32", "bfloat16"]]


@pytest.mark.parametrize("eager", [True, False])
def test_a_step_is_timed_as_python_where_it_cannot_be_traced_or_functions_run_eagerly(eager):
    model, calls = layers(), []

    def step(model):
        loss = tf.reduce_sum(model(X))
        calls.append(loss if eager else loss.numpy())
        return loss

    tf.config.run_functions_eagerly(eager)
    try:
        seconds = PROBE.clock(model, step, None)
        calls.clear()
        assert seconds() > 0
    finally:
        tf.config.run_functions_eagerly(False)
    assert len(calls) >= 2  # one before the clock starts


@pytest.mark.parametrize(("plan", "looks"), [(None, 0), (BFLOAT16, 1)])
def test_gradients_are_looked_at_where_something_is_cast_as_in_training(plan, looks, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "ampx_tensorflow.gradients.finite", lambda slopes: seen.append(len(slopes)) or tf.constant(True)
    )
    PROBE.clock(layers(), lambda model: tf.reduce_sum(tf.cast(model(X), tf.float32)), plan)()
    assert seen == [4] * looks


class Noticed(keras.layers.Layer):
    """Hands on what it gets, and tells the host where that has the dtype in which it is slow."""

    def __init__(self, slow, notice):
        super().__init__()
        self.slow, self.notice = slow, notice

    def call(self, x):
        if x.dtype.name != self.slow:
            return x

        def notice(values):
            self.notice()
            return values

        @tf.custom_gradient
        def noticed(x):
            values = tf.numpy_function(notice, [tf.cast(x, tf.float32)], tf.float32)
            return tf.cast(tf.ensure_shape(values, x.shape), x.dtype), lambda upstream: upstream

        return noticed(x)


@pytest.mark.parametrize("slow", ["bfloat16", "float32"])
def test_tune_stays_in_float32_where_a_compiled_step_is_slower_in_low_precision_and_there_only(slow, monkeypatch):
    """A step takes two seconds, and one more where a layer runs in the slow dtype."""
    slowed = []
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Noticed(slow, lambda: slowed.append(slow))])

    def timed(compute, wait):
        slowed.clear()
        compute()
        return 3.0 if slowed else 2.0

    monkeypatch.setattr(replaying, "timed", timed)
    policy = ampx.tune(
        lambda model: tf.reduce_sum(tf.cast(model(tf.constant(X)), tf.float32)),
        model,
        framework="tensorflow",
        device="cpu",
        dtype="bfloat16",
        repeats=1,
    )
    assert policy.deny == ()
    if slow == "bfloat16":
        assert (policy.dtype, policy.enabled, policy.speed) == ("float32", False, 1.0)
    else:
        assert (policy.dtype, policy.enabled, policy.speed) == ("bfloat16", True, 1.5)
