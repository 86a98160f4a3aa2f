"""What only a GPU can show."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="TensorFlow sees no GPU"),
]


def make_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])


def test_auto_chooses_float16_on_tensor_cores():
    assert ampx.init("tensorflow").effective.dtype == "float16"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layers_compute_in_low_precision_and_keep_float32_variables(dtype):
    ampx.init("tensorflow", dtype=dtype)
    layer = keras.layers.Dense(4)
    assert layer(tf.ones([2, 8])).dtype.name == dtype
    assert layer.kernel.dtype == "float32"


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_skips_and_cures_a_real_float16_overflow(jit_compile):
    amp = ampx.init("tensorflow", dtype="float16", loss_scale=ampx.LossScale(init_scale=2.0**24))
    model = make_model()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer=opt, loss="mse", jit_compile=jit_compile)
    model.fit(np.ones((256, 8), "float32"), np.zeros((256, 1), "float32"), batch_size=8, verbose=0)
    assert opt.loss_scale < 2.0**24
    assert opt.last_step.applied
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_plain_functions_are_rewritten_in_float16():
    amp = ampx.init("tensorflow", dtype="float16")
    function = amp.prepare(tf.function(lambda a: tf.matmul(tf.nn.relu(a), tf.eye(64)) + 0.0))
    assert float(function(tf.fill([64, 64], 1.0 + 2.0**-9 + 2.0**-13))[0, 0]) == 1.0 + 2.0**-9


def test_bfloat16_plain_functions_are_refused_where_the_rewriter_does_nothing():
    amp = ampx.init("tensorflow", dtype="bfloat16")
    try:
        function = amp.prepare(tf.function(lambda a: tf.matmul(tf.nn.relu(a), tf.eye(64)) + 0.0))
    except ampx.UnsupportedByBackendError:
        return
    assert float(function(tf.fill([64, 64], 1.0 + 2.0**-9))[0, 0]) == 1.0


@pytest.mark.skipif(len(tf.config.list_physical_devices("GPU")) < 2, reason="TensorFlow sees no second GPU")
def test_an_overflow_on_the_second_gpu_makes_both_skip():
    amp = ampx.init("tensorflow", level="O0", loss_scale="dynamic")
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = make_model()
        opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer=opt, loss="mse")
    count = strategy.num_replicas_in_sync
    x = np.ones((count, 8), "float32")
    x[1] = np.inf
    model.fit(x, np.zeros((count, 1), "float32"), batch_size=count, verbose=0, shuffle=False)
    assert opt.loss_scale == 2.0**15
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
