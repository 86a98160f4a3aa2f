"""A function that was traced is traced anew when what it depends on has changed, and only then."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx


class Watch(keras.layers.Layer):
    """Notes the compute dtype of every trace."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x):
        self.seen.append(self.compute_dtype)
        return x

    def new(self):
        """What was noted since the last look."""
        seen, self.seen = list(dict.fromkeys(self.seen)), []
        return seen


@pytest.fixture
def casting():
    return ampx.init("tensorflow", dtype="bfloat16")


@pytest.mark.parametrize("jit", [False, True])
def test_a_function_follows_regions_sessions_and_shutdown(casting, jit):
    layer = keras.layers.Dense(3)

    @tf.function(jit_compile=jit)
    def run(x):
        return layer(x)

    x = tf.ones((2, 3))
    for _ in range(2):
        assert run(x).dtype == tf.bfloat16
        with ampx.autocast(enabled=False):
            assert run(x).dtype == tf.float32
        with ampx.autocast(dtype="float16"):
            assert run(x).dtype == tf.float16
    assert run.experimental_get_tracing_count() <= 4  # one a dtype, and one before anything was known
    ampx.shutdown()
    assert run(x).dtype == tf.float32
    ampx.init("tensorflow", dtype="float16")
    assert run(x).dtype == tf.float16
    assert run.experimental_get_tracing_count() <= 4


def test_functions_that_call_traced_functions_follow_too(casting):
    layer = keras.layers.Dense(3)
    inner = tf.function(lambda x: layer(x), autograph=False)
    outer = tf.function(lambda x: inner(x), autograph=False)
    x = tf.ones((2, 3))
    assert inner(x).dtype == tf.bfloat16
    assert outer(x).dtype == tf.bfloat16
    with ampx.autocast(enabled=False):
        assert outer(x).dtype == tf.float32
    assert outer(x).dtype == tf.bfloat16


def test_threads_see_their_own_casting(casting):
    layer = keras.layers.Dense(3)
    run = tf.function(lambda x: layer(x), autograph=False)
    x, dtypes = tf.ones((2, 3)), []
    assert run(x).dtype == tf.bfloat16
    with ampx.autocast(enabled=False):
        assert run(x).dtype == tf.float32
        other = threading.Thread(target=lambda: dtypes.append(run(x).dtype))
        other.start()
        other.join()
    assert dtypes == [tf.bfloat16]


def test_functions_without_layers_are_left_alone(casting):
    run = tf.function(lambda x: x * 2, autograph=False)
    x = tf.ones((2, 3))
    run(x)
    with ampx.autocast(enabled=False):
        run(x)
    assert run.experimental_get_tracing_count() == 1


def test_fit_and_predict_follow(casting):
    watch = Watch()
    model = keras.Sequential([keras.Input((3,)), watch, keras.layers.Dense(1, dtype="float32")])
    model.compile(casting.wrap_optimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")
    watch.new()
    model.fit(x, y, verbose=0)
    assert watch.new() == ["bfloat16"]
    model.fit(x, y, verbose=0)
    assert watch.new() == []
    with ampx.autocast(enabled=False):
        model.fit(x, y, verbose=0)
        model.predict(x, verbose=0)
    assert watch.new() == ["float32"]
    model.predict(x, verbose=0)
    assert watch.new() == ["bfloat16"]


def test_fit_under_a_strategy_follows(casting):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        watch = Watch()
        model = keras.Sequential([keras.Input((3,)), watch, keras.layers.Dense(1, dtype="float32")])
        model.compile(casting.wrap_optimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")
    model.fit(x, y, verbose=0)
    watch.new()
    with ampx.autocast(enabled=False):
        model.fit(x, y, verbose=0)
    assert watch.new() == ["float32"]


def test_a_loaded_configuration_reaches_traces(casting):
    variable = tf.Variable([1.0])
    opt = casting.wrap_optimizer(keras.optimizers.SGD(0.1), loss_scale=ampx.LossScale(init_scale=4.0))

    @tf.function
    def step():
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable), opt) as scaled:
            pass
        opt.apply_gradients(zip(tape.gradient(scaled, [variable]), [variable], strict=True))

    step()
    assert opt.loss_scale == 4.0
    state = casting.state_dict(opt)
    state["groups"][0]["config"] |= {"growth_interval": 1, "growth_factor": 8.0}
    casting.load_state_dict(state, opt)
    step()
    assert opt.loss_scale == 32.0


def test_the_trace_for_the_arguments_is_found_whatever_was_asked_for_before(casting):
    layer = keras.layers.Dense(3)

    @tf.function
    def run(x, factor):
        return layer(x)[:, 0] * factor

    for rows in (2, 2, 4, 2, 4, 4):
        for factor in (1, 1, 2):
            assert run(tf.ones((rows, 3)), factor).shape == (rows,)
    assert run.experimental_get_tracing_count() == 5  # the first was traced before anything was known


def test_a_wider_trace_replaces_what_was_found_before(casting):
    layer = keras.layers.Dense(3)
    run = tf.function(lambda x: layer(x), reduce_retracing=True)
    shapes = [run(tf.ones((rows, 3))).shape[0] for rows in (2, 3, 2, 4, 3, 5)]
    assert shapes == [2, 3, 2, 4, 3, 5]
    assert run.experimental_get_tracing_count() <= 4
