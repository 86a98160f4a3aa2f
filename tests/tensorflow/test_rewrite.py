"""Casting of plain functions by TensorFlow's graph rewriter."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.core.protobuf.device_properties_pb2 import DeviceProperties, NamedDevice
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.grappler import cluster, tf_optimizer

import ampx
from ampx.backend import CastPlan
from ampx_tensorflow import rewrite
from ampx_tensorflow.backend import TensorFlowBackend

DTYPES = ["bfloat16", "float16"]
# 1 + 2**-9 + 2**-13: float16 keeps ten bits behind the point, bfloat16 seven.
VALUE = 1.0 + 2.0**-9 + 2.0**-13
ROUNDED = {"float32": VALUE, "float16": 1.0 + 2.0**-9, "bfloat16": 1.0}


def product():
    return tf.function(lambda a: tf.matmul(tf.nn.relu(a), tf.eye(64)) + 0.0)


def computed_in(function):
    rounded = float(function(tf.fill([64, 64], VALUE))[0, 0])
    return next(dtype for dtype, value in ROUNDED.items() if value == rounded)


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


def test_what_is_not_cast_is_refused():
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        with pytest.raises(ampx.UnsupportedByBackendError, match="jit_compile"):
            amp.prepare(tf.function(lambda a: a, jit_compile=True))
        function = prepared(amp, product())
        with pytest.raises(ampx.ProtocolError, match="the outer function"):
            tf.function(lambda a: function(a))(tf.ones([64, 64]))


@pytest.mark.parametrize(
    ("casts", "advice"), [((), "accepted there: no dtype. Use Keras layers"), (("float16",), "Choose dtype='float16'")]
)
def test_a_refusal_names_the_dtype_that_is_cast(monkeypatch, casts, advice):
    monkeypatch.setattr(rewrite, "_works", lambda device, dtype: dtype in casts)
    with (
        ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp,
        pytest.raises(ampx.UnsupportedByBackendError, match=f"it was tried.*{advice}"),
    ):
        amp.prepare(product())


def test_the_rest_is_the_functions_own():
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        plain = product()
        function = prepared(amp, plain)
        assert function.python_function is plain.python_function
        assert function.get_concrete_function(tf.ones([64, 64])) is not None


def rewritten_for_a_gpu(option):
    """The dtype of each operation after the rewriter saw a graph on a GPU, which it is told of and need not have."""
    v1, place = tf.compat.v1, "/job:localhost/replica:0/task:0/device:GPU:0"
    with tf.Graph().as_default() as graph, tf.device(place):
        product = tf.matmul(v1.placeholder(tf.float32, [64, 64]), v1.placeholder(tf.float32, [64, 64]))
        guarded = tf.math.log(tf.nn.softmax(product) + 1e-8)
        v1.add_to_collection(v1.GraphKeys.TRAIN_OP, tf.identity(guarded, name="out"))
        exported = v1.train.export_meta_graph(graph=graph)
    gpu = DeviceProperties(type="GPU", environment={"architecture": "9.0", "cuda": "12000", "cudnn": "9000"})
    config = ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.append(option)
    options.meta_optimizer_iterations, options.min_graph_nodes = RewriterConfig.ONE, -1
    nodes = tf_optimizer.OptimizeGraph(
        config, exported, cluster=cluster.Cluster(devices=[NamedDevice(name=place, properties=gpu)])
    ).node
    return {node.op: tf.dtypes.as_dtype(node.attr["T"].type).name for node in nodes if node.attr["T"].type}


def test_bfloat16_graphs_on_gpus_are_refused_since_the_rewriter_leaves_them_in_float32(record_property):
    """Asked on a CPU: the rewriter needs no GPU to rewrite for one, and the refusal none to be made."""
    option, _ = rewrite._OPTIONS["bfloat16"]
    assert set(rewritten_for_a_gpu(option).values()) == {"float32"}
    plan = CastPlan("gpu", "bfloat16", "O1", (), ())
    with pytest.raises(ampx.UnsupportedByBackendError, match="dtype='float16'") as caught:
        TensorFlowBackend().prepare(product(), None, plan)
    assert not rewrite.casts(plan)
    record_property("ampx.refused", ["tensorflow", "gpu, graphs/bfloat16/O1", str(caught.value)])


def test_graphs_on_gpus_are_cast_to_float16_but_small_numbers_with_them():
    """As the manual says: the logarithm of a probability is in float16, too, where 1e-8 is 0."""
    option, _ = rewrite._OPTIONS["float16"]
    dtypes = rewritten_for_a_gpu(option)
    assert {dtypes[name] for name in ("MatMul", "Softmax", "Log")} == {"float16"}
    assert tf.cast(tf.constant(1e-8), tf.float16) == 0
