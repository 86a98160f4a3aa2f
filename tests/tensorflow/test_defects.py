"""Defects of plain Keras (each shown in a process of its own), and the right result through ampx."""

import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx

# Two replicas on one CPU; the batch has two rows, one for each, and `bad` says whose row is infinite.
MIRRORED = """
import json
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def fit(make_optimizer, bad, custom_loop=False):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = make_optimizer()
        model.compile(optimizer=optimizer, loss="mse")
    x = np.ones((2, 3), "float32")
    x[bad] = np.inf
    model.fit(x, np.zeros((2, 1), "float32"), batch_size=2, verbose=0, shuffle=False)
    scales = [float(one) for one in strategy.experimental_local_results(optimizer.dynamic_scale.value)]
    return [bool(np.isfinite(model.get_weights()[0]).all()), scales, int(optimizer.iterations.numpy())]
"""


class TestDefect10OnlyTheFirstReplicaIsLookedAt:
    def test_native(self, native):
        code, out, err = native(
            MIRRORED
            + """
make = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=2.0**16)
print(json.dumps([fit(make, bad) for bad in (0, 1)]))
"""
        )
        assert code == 0, err
        first, second = json.loads(out.splitlines()[-1])
        assert first == [True, [2.0**15] * 2, 0]
        assert second == [False, [2.0**16] * 2, 1]  # infinite weights, and the scale counts a good step

    def test_ampx(self, native):
        code, out, err = native(
            MIRRORED
            + """
import ampx
amp = ampx.init("tensorflow", level="O0", loss_scale="dynamic")
print(json.dumps([fit(lambda: amp.wrap_optimizer(keras.optimizers.SGD(0.5)), bad) for bad in (0, 1)]))
"""
        )
        assert code == 0, err
        assert json.loads(out.splitlines()[-1]) == [[True, [2.0**15] * 2, 0]] * 2

    def test_tf_keras_is_right_natively(self, native):
        """It adds up the gradients of the replicas before it looks at them."""
        code, out, err = native(
            MIRRORED.replace("optimizer.dynamic_scale.value", "optimizer._loss_scale.current_loss_scale")
            + """
import tf_keras as keras
make = lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=2.0**16)
print(json.dumps([fit(make, bad) for bad in (0, 1)]))
"""
        )
        assert code == 0, err
        assert json.loads(out.splitlines()[-1]) == [[True, [2.0**15] * 2, 1]] * 2  # but counts the skipped step


class TestDefect11ScalingIsComputedInFloat16:
    def test_native(self, native):
        code, out, err = native(
            """
import tf_keras
loss = tf.constant(2.0, tf.float16)
opt = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**15)
print(float(opt.scale_loss(loss)))
opt = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(1.0), initial_scale=2.0**15)
print(float(opt.get_scaled_loss(loss)))
"""
        )
        assert code == 0, err
        assert out.split()[-2:] == ["inf", "inf"]

    @pytest.mark.parametrize("built", [False, True])
    def test_ampx(self, amp, built):
        parameter = keras.Variable(1.0)
        opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
        if built:
            opt.build([parameter])
        with tf.GradientTape() as tape:
            loss = tf.cast(parameter.value, tf.float16) * 2.0
            with ampx.scale_loss(loss, opt) as scaled:
                pass
        assert scaled.dtype == tf.float32
        assert float(scaled) == 2.0**17
        opt.apply_gradients([(tape.gradient(scaled, parameter.value), parameter)])
        assert not opt.last_step.applied  # the gradient itself passes through float16, and overflows there
        assert opt.loss_scale == 2.0**15

    def test_ampx_in_fit(self, amp):
        opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
        scaled = opt.scale_loss(tf.constant(2.0, tf.float16))
        assert (scaled.dtype, float(scaled)) == (tf.float32, 2.0**17)

    def test_ampx_with_tf_keras(self, amp):
        tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
        opt = amp.wrap_optimizer(tf_keras.optimizers.SGD(1.0))
        scaled = opt.get_scaled_loss(tf.constant(2.0, tf.float16))
        assert (scaled.dtype, float(scaled)) == (tf.float32, 2.0**17)


class TestDefect12ApplyDividesWhatWasNeverScaled:
    def test_native(self, native):
        code, out, err = native(
            """
v = keras.Variable(1.0)
opt = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**16)
opt.apply_gradients([(tf.constant(1.0), v)])
print(1.0 - float(v))
"""
        )
        assert code == 0, err
        assert float(out.split()[-1]) == 2.0**-16  # 1.0 would be right

    def test_ampx_refuses(self, amp):
        parameter = keras.Variable(1.0)
        opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
        with pytest.raises(ampx.NotScaledError):
            opt.apply_gradients([(tf.constant(1.0), parameter)])
        assert float(parameter.value) == 1.0
        assert opt.loss_scale == 2.0**16
        with tf.GradientTape() as tape, ampx.scale_loss(parameter.value * 1.0, opt) as scaled:
            pass
        opt.apply_gradients([(tape.gradient(scaled, parameter.value), parameter)])
        assert float(parameter.value) == 0.0


class TestDefect13ThePolicyOfOneThread:
    def test_native(self, native):
        code, out, err = native(
            """
import threading
keras.config.set_dtype_policy("mixed_bfloat16")
seen = []
thread = threading.Thread(target=lambda: seen.append(keras.layers.Dense(1).compute_dtype))
thread.start()
thread.join()
print(keras.layers.Dense(1).compute_dtype, *seen)
"""
        )
        assert code == 0, err
        assert out.split()[-2:] == ["bfloat16", "float32"]

    def test_ampx(self):
        amp = ampx.init("tensorflow", dtype="bfloat16", device="cpu")
        seen = {}

        def build(name):
            seen[name] = keras.layers.Dense(1)(np.ones((1, 1), "float32")).dtype

        def entered():
            amp.enter_thread()
            build("thread")

        build("main")
        thread = threading.Thread(target=entered)
        thread.start()
        thread.join()
        assert seen == {"main": tf.bfloat16, "thread": tf.bfloat16}
