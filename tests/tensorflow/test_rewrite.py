"""Casting of plain functions by TensorFlow's graph rewriter."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx
from ampx_tensorflow import rewrite

DTYPES = ["bfloat16", "float16"]
# 1 + 2**-9 + 2**-13: float16 keeps ten bits behind the point, bfloat16 seven.
VALUE = 1.0 + 2.0**-9 + 2.0**-13
ROUNDED = {"float32": VALUE, "float16": 1.0 + 2.0**-9, "bfloat16": 1.0}


def product():
    return tf.function(lambda a: tf.matmul(tf.nn.relu(a), tf.eye(64)) + 0.0)


def computed_in(function):
    found = float(function(tf.fill([64, 64], VALUE))[0, 0])
    return next(dtype for dtype, value in ROUNDED.items() if value == found)


def prepared(amp, function):
    try:
        return amp.prepare(function)
    except ampx.UnsupportedByBackendError as error:
        assert "casts nothing (it was tried)" in str(error)  # noqa: PT017 -- depends on the machine
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def options_are_restored():
    before = {name: value for name, value in tf.config.optimizer.get_experimental_options().items() if value}
    yield
    after = {name: value for name, value in tf.config.optimizer.get_experimental_options().items() if value}
    assert after == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prepared_function_is_cast_while_the_session_casts(dtype):
    plain = product()
    assert computed_in(plain) == "float32"  # traced before; the rewriter takes it up all the same
    with ampx.init("tensorflow", dtype=dtype, device="cpu") as amp:
        function = prepared(amp, plain)
        assert computed_in(function) == dtype
        assert computed_in(plain) == "float32"
        with amp.autocast(enabled=False):
            assert computed_in(function) == "float32"
        assert computed_in(function) == dtype
    assert computed_in(function) == "float32"


def test_regions_cast_where_the_session_does_not():
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu", process_wide=False) as amp:
        function = prepared(amp, product())
        assert computed_in(function) == "float32"
        with amp.autocast():
            assert computed_in(function) == "bfloat16"


def test_a_float32_layer_is_not_touched_by_other_functions():
    """With the rewriter on for the whole process, it would be."""
    layer = keras.layers.Dense(64, dtype="float32", kernel_initializer="identity", use_bias=False)
    function = tf.function(lambda a: layer(tf.nn.relu(a)) + 0.0)
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        prepared(amp, product())(tf.ones([64, 64]))
        assert computed_in(function) == "float32"
        option = "auto_mixed_precision_onednn_bfloat16"
        tf.config.optimizer.set_experimental_options({option: True})
        try:
            assert computed_in(function) == "bfloat16"
        finally:
            tf.config.optimizer.set_experimental_options({option: False})


def test_a_training_step_is_cast_and_scaled():
    rng = np.random.default_rng(0)
    inputs = tf.constant(rng.normal(size=(64, 64)), tf.float32)
    weights = tf.Variable(rng.normal(size=(64, 64)) / 8, dtype=tf.float32)
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu", loss_scale="dynamic") as amp:
        opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))

        @tf.function
        def step(factor):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.matmul(inputs, weights) - 1.0)) * factor
                with ampx.scale_loss(loss, opt) as scaled:
                    pass
            opt.apply_gradients([(tape.gradient(scaled, weights), weights)])
            return loss

        cast = prepared(amp, step)
        losses = [float(cast(tf.constant(factor))) for factor in (1.0, float("inf"), 1.0, 1.0)]
        assert losses[3] < losses[2] < losses[0]
        assert opt.loss_scale == 2.0**15
        assert weights.dtype == tf.float32


def test_an_exception_restores_the_options():
    @tf.function
    def fails(a):
        tf.debugging.Assert(False, ["no"])
        return tf.matmul(a, a)

    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        function = prepared(amp, fails)
        with pytest.raises(tf.errors.InvalidArgumentError):
            function(tf.ones([64, 64]))


def test_what_is_not_cast_is_refused(monkeypatch):
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        with pytest.raises(ampx.UnsupportedByBackendError, match="jit_compile"):
            amp.prepare(tf.function(lambda a: a, jit_compile=True))
        function = prepared(amp, product())
        with pytest.raises(ampx.ProtocolError, match="the outer function"):
            tf.function(lambda a: function(a))(tf.ones([64, 64]))
        monkeypatch.setattr(rewrite, "_works", lambda device, dtype: False)
        with pytest.raises(ampx.UnsupportedByBackendError, match="it was tried"):
            amp.prepare(product())


def test_the_rest_is_the_functions_own():
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        plain = product()
        function = prepared(amp, plain)
        assert function.python_function is plain.python_function
        assert function.get_concrete_function(tf.ones([64, 64])) is not None
