"""The kit on TensorFlow with Keras."""

import importlib.util
import math
import pathlib
import random
from typing import Any, ClassVar

import pytest
from hypothesis import settings

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

import keras
import tensorflow as tf
from interrupted_steps import InterruptedRegionSuite, InterruptedStepSuite, Training

import ampx
from ampx.testing import BackendSuite, FuzzSuite, Harness, PluginSuite
from ampx_tensorflow.oplists import ListsPlan
from matrix import MatrixSuite
from transfer import TransferSuite


@tf.custom_gradient
def pull(parameter, slopes):
    """The sum of a parameter, with derivatives of the caller's choice."""

    def slope(upstream):
        return tf.cast(upstream * tf.reshape(slopes, parameter.shape), parameter.dtype), tf.zeros_like(slopes)

    return tf.reduce_sum(tf.cast(parameter, tf.float32)), slope


class Twice(keras.layers.Layer):
    def call(self, x):
        return x * 1, x * 2


class TensorFlowHarness(Harness):
    """Keras optimizers over plain variables; the loss is scaled outside the tape."""

    framework, plugin, device = "tensorflow", "ampx_tensorflow", "cpu"
    dtype: ClassVar[Any] = "bfloat16"
    detaches = False  # whether a gradient can flow from a tensor is known to the tape only
    guards_raw_steps = tells_rates = True

    def tensor(self, values, dtype):
        return tf.constant(values, dtype)

    def dtype_of(self, tensor):
        return tf.as_dtype(tensor.dtype).name

    def numbers(self, tensor):
        tensor = tf.convert_to_tensor(tensor)
        wide = tf.cast(tensor, tf.float32) if tensor.dtype.is_floating else tensor
        return tf.reshape(wide, [-1]).numpy().tolist()

    def parameter(self, values):
        return tf.Variable(values, dtype=tf.float32)

    def optimizer(self, parameters, momentum):
        raw = keras.optimizers.SGD(0.5, momentum=0.5 if momentum else 0.0)
        raw.build(parameters)
        return raw

    def set_rate(self, raw, rate):
        raw.learning_rate = rate

    def optimizer_state(self, raw):
        return [variable.numpy().tolist() for variable in raw.variables]

    def loss(self, parameters, gradients):
        with tf.GradientTape() as tape:
            pairs = zip(map(tf.convert_to_tensor, parameters), gradients, strict=True)
            loss = tf.add_n([pull(parameter, tf.constant(slopes)) for parameter, slopes in pairs])
        loss.tape = tape
        return loss

    def wide_loss(self, parameters):
        with tf.GradientTape() as tape:
            loss = parameters[0] * 2.0 + tf.reduce_sum(parameters[1]) * 0.0
        loss.tape = tape
        return loss

    def nan_loss(self, parameters):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(p) for p in parameters]) * float("nan")
        loss.tape = tape
        return loss

    def backward(self, scaled, parameters):
        if hasattr(scaled, "gradient"):
            return scaled.gradient(scaled.gradient.loss.tape, parameters)
        return scaled.tape.gradient(scaled, parameters)

    def gradients(self, parameters):
        raise NotImplementedError("gradients are values")

    def step(self, opt, gradients):
        opt.apply(gradients)

    def watch_update(self, raw, watch):
        update = raw.update_step

        def watched(*args, **kwargs):
            if args[1] is raw._trainable_variables[0]:
                watch()
            return update(*args, **kwargs)

        raw.update_step = watched

    def casting(self):
        return keras.config.dtype_policy(), keras.config.dtype_policy().compute_dtype

    def computes_in(self):
        layer = keras.layers.Dense(2)
        session = self.session()
        if session is not None and isinstance(session.plan, ListsPlan):  # entries are for models that are prepared
            layer = session.prepare(layer)
        return layer(tf.ones((2, 2))).dtype.name

    def session(self):
        try:
            return ampx.current("tensorflow")
        except ampx.NotInitializedError:
            return None

    def operation(self):
        return keras.layers.Dense

    def model(self):
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])

    def parameters_of(self, model):
        return model.trainable_variables

    def chain(self, weights, inputs, noise=False):
        names = [f"layer_{position}" for position in range(len(weights))]
        layers = [
            keras.layers.Dense(1, use_bias=False, name=name, kernel_initializer=keras.initializers.Constant(weight))
            for name, weight in zip(names, weights, strict=True)
        ]
        if noise:
            layers += [keras.layers.BatchNormalization(scale=False, center=False), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((1,)), *layers])
        batch = tf.constant([[value] for value in inputs], tf.float32)
        return model, lambda model: tf.reduce_sum(tf.cast(model(batch, training=noise), tf.float32)), names

    def fork(self, inputs):
        layers, _, _ = self.chain((1.0,), ())
        model = keras.Model(layers.inputs, Twice(name="fork")(layers.outputs[0]))

        def step(model):
            first, second = model(self.batch(inputs))
            return tf.reduce_sum(tf.cast(first, tf.float32)) + 3 * tf.reduce_sum(tf.cast(second, tf.float32))

        return model, step, "fork"

    def larger(self, model):
        larger = keras.Sequential([model])
        return larger, model.name, lambda batch: larger.layers[0](batch)

    def shipped(self, weights, norm=False):
        model, _, names = self.chain(weights, ())
        if norm:
            model.add(keras.layers.BatchNormalization(name="norm"))
            names = [*names, "norm"]
        return model, names

    def batch(self, inputs):
        return tf.constant([[value] for value in inputs], tf.float32)

    def stored(self, model, layer):
        return {variable.dtype for variable in model.get_layer(layer).weights}

    def model_state(self, model):
        state = [variable.numpy().tolist() for variable in model.variables]
        return state, tf.random.get_global_generator().state.numpy().tolist(), random.getstate()

    def surroundings(self):
        return keras.config.floatx(), keras.config.dtype_policy().name, keras.config.image_data_format()


class InsideTheTape(TensorFlowHarness):
    """The same with the loss scaled inside a tape, and float16."""

    dtype = "float16"

    open_tapes: ClassVar[list[tf.GradientTape]] = []

    def __init__(self):
        self.tape = tf.GradientTape(persistent=True)
        self.tape.__enter__()
        self.open_tapes.append(self.tape)

    def backward(self, scaled, parameters):
        with self.tape.stop_recording():
            try:
                return self.tape.gradient(scaled, parameters)
            except ampx.ProtocolError:  # a loss of another id than the first of its step
                return scaled.gradient(self.tape, parameters)


@pytest.fixture(autouse=True)
def _tapes_end():
    """A tape that goes on would record the tests of other files, and break the graphs that they build."""
    yield
    while InsideTheTape.open_tapes:
        InsideTheTape.open_tapes.pop().__exit__(None, None, None)


# Eager steps of Keras take milliseconds.
FEW = settings(max_examples=20, deadline=None, database=None, derandomize=True)


class TestOutsideTheTape(BackendSuite):
    harness = TensorFlowHarness
    hypothesis = FEW


class TestInsideTheTape(BackendSuite):
    harness = InsideTheTape
    hypothesis = settings(FEW, max_examples=5)  # where a loss is scaled changes no schedule


class TensorFlowTraining(Training):
    def unscale(self, bench):
        bench.pending, _ = tf.clip_by_global_norm(bench.opt.get_unscaled_gradients(bench.pending), self.max_norm)

    def apply(self, bench, opt):
        opt.apply_gradients(zip(bench.pending, bench.parameters, strict=True))

    def step_raw(self):
        pending = [bench.opt.ampx_pending for bench in self.benches]
        if self.by == "unscale" or any(bench.pending is None for bench in self.benches):
            return
        for bench, refuses in zip(self.benches, pending, strict=True):
            if refuses:
                with pytest.raises(ampx.RawStepError):
                    self.apply(bench, bench.raw)
        # Not pending: the step was complete, or its gradients were never made.
        assert all(pending) or len(pending) > 1 or not self.stand_at(self.plainly()) or not self.is_finite


class TestInterruptedSteps(InterruptedStepSuite):
    harness, training = TensorFlowHarness, TensorFlowTraining
    session: ClassVar[Any] = {"level": "O0", "dtype": "float32"}
    stride = 97
    takes_old_gradients = False


class TfKerasHarness(TensorFlowHarness):
    def optimizer(self, parameters, momentum):
        tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
        return tf_keras.optimizers.SGD(0.5, momentum=0.5 if momentum else 0.0)


class TestInterruptedStepsOfTfKeras(TestInterruptedSteps):
    harness = TfKerasHarness
    timed_out = 0
    cases: ClassVar[Any] = {"plain": {}, "overflow": {"third": math.inf}}


class OldHarness(TensorFlowHarness):
    def optimizer(self, parameters, momentum):
        return tf.compat.v1.train.MomentumOptimizer(0.5, 0.5 if momentum else 0.0)


class TestInterruptedStepsOfTensorFlow1(TestInterruptedStepsOfTfKeras):
    harness = OldHarness


class TestInterruptedRegions(InterruptedRegionSuite):
    harness, training = TensorFlowHarness, TensorFlowTraining


# Not inside the tape: it would record every operation of a script, and take three times as long.
class TestFuzz(FuzzSuite):
    harness = TensorFlowHarness
    steps = 100  # each takes longer than ten without a framework


if tf.config.list_physical_devices("GPU"):

    class GpuHarness(InsideTheTape):
        device = "gpu"

    @pytest.mark.gpu
    class TestOnGpu(BackendSuite):
        harness = GpuHarness

    @pytest.mark.gpu
    class TestMatrixOnGpu(MatrixSuite):
        harness = GpuHarness

else:

    @pytest.mark.gpu
    def test_on_gpu():
        pytest.skip("no CUDA device for TensorFlow: the kit did not run on one")


class TestPlugin(PluginSuite):
    plugin, framework, modules = "ampx_tensorflow", "tensorflow", ("tensorflow", "keras")


class TestMatrix(MatrixSuite):
    harness = TensorFlowHarness


class TestTransfer(TransferSuite):
    harness = TensorFlowHarness
    states = pathlib.Path(__file__).parents[1] / "states"
