"""`ampx run` in TensorFlow: what a script that knows nothing of ampx makes is cast, scaled, and restored."""

import contextlib
import json
import math
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.ops import gen_linalg_ops, gen_math_ops, gen_nn_ops

import ampx
from ampx.backend import offer
from ampx.errors import RunRefusedError
from ampx.plugins import Registry
from ampx.run import Automation, LossCurve, Run, RunSettings
from ampx.run.report import headline
from ampx.run.supervisor import Finished
from ampx_tensorflow import devices, rewrite
from processes import run_python

v1 = tf.compat.v1
PLAIN = Path(__file__).parents[1] / "programs" / "plain"
# 1 + 2**-9 + 2**-13: bfloat16 keeps seven bits behind the point, float16 ten.
VALUE = 1.0 + 2.0**-9 + 2.0**-13
LOW = ("bfloat16", "float16")
ROUNDED = {"bfloat16": 1.0, "float16": 1.0 + 2.0**-9}
pytestmark = pytest.mark.filterwarnings("ignore:.*emulated:ampx.errors.PrecisionWarning")


@pytest.fixture
def start(monkeypatch):
    """Automate, in a dtype that the rewriter knows here if graphs are to be cast."""
    for name in ("TF_ENABLE_AUTO_MIXED_PRECISION", "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE"):
        monkeypatch.delenv(name, raising=False)

    def automated(dtype="bfloat16", graphs=True, deny=()):
        if graphs and not rewrite._works("cpu", dtype):
            pytest.skip(f"TensorFlow's rewriter casts nothing to {dtype} here: it was tried")
        run = Run("tensorflow", RunSettings(dtype, "O1", "cpu", deny=deny))
        return run, offer(Registry().load("tensorflow"), Automation).automate(run)

    return automated


def patched():
    base = keras.optimizers.Optimizer
    return [
        *(getattr(base, name) for name in ("__init__", "apply")),
        *(getattr(keras.Model, name) for name in ("compile", "fit", "train_on_batch", "_aggregate_additional_loss")),
        *(getattr(tf.GradientTape, name) for name in ("__enter__", "gradient")),
        *(getattr(gen_math_ops, name) for name in ("mat_mul", "batch_mat_mul_v2")),
        *(getattr(gen_nn_ops, name) for name in ("conv2d", "conv2d_backprop_input", "depthwise_conv2d_native")),
        gen_linalg_ops.einsum,
        *(getattr(v1.train.Optimizer, name) for name in ("minimize", "compute_gradients", "apply_gradients")),
        *(getattr(BaseSession, name) for name in ("__init__", "run", "close")),
        keras.config.dtype_policy().name,
        {name for name, on in tf.config.optimizer.get_experimental_options().items() if on},
    ]


@pytest.fixture(autouse=True)
def _everything_is_restored():
    before = patched()
    yield
    assert patched() == before


def model(**options):
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(2, kernel_initializer="ones", use_bias=False),
            keras.layers.Dense(1, kernel_initializer="ones", use_bias=False, **options),
        ]
    )


def loop(variable, optimizer, dtype):
    """A training step on a product whose gradient is what the product's operand was rounded to, times a factor."""
    values, eye = tf.fill([64, 64], VALUE), tf.eye(64)

    def step(factor):
        with tf.GradientTape() as tape:
            product = tf.matmul(tf.nn.relu(values), eye) + 0.0
            loss = tf.reduce_sum(variable) * tf.stop_gradient(product[0, 0]) * factor
        gradients = tape.gradient(loss, [variable])
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        return gradients[0]

    return step


def test_a_denied_layer_of_a_compiled_model_is_reported_in_float32(start):
    run, region = start(graphs=False, deny=("module:first",))
    layers = [keras.layers.Dense(2, name=name) for name in ("first", "second", "last")]
    with region:
        keras.Sequential([keras.Input((4,)), *layers]).compile(optimizer="sgd", loss="mse")
    assert run.recorder.ops == {("Dense", "float32"): 2, ("Dense", "bfloat16"): 1}


def test_a_compiled_model_is_cast_but_for_its_outputs(start):
    run, region = start()
    ours = model()
    x = np.full((8, 64), VALUE, "float32")
    with region:
        ours.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        assert [layer.compute_dtype for layer in ours.layers] == ["bfloat16", "float32"]
        assert ours.predict(x, verbose=0)[0, 0] == 128.0
        assert isinstance(ours.optimizer, ampx.optimizer.WrappedOptimizer)
        assert model().layers[0].compute_dtype == "float32"  # what is not compiled is left alone
        ours.fit(x, np.zeros((8, 1), "float32"), batch_size=2, epochs=2, verbose=0)
        assert run.recorder.steps == 8
        assert run.recorder.ops == {("Dense", "bfloat16"): 1, ("Dense", "float32"): 1}
        assert run.recorder.seconds["train"] > 0
    assert ours.predict(x, verbose=0)[0, 0] > 128.0
    with pytest.raises(ampx.NotInitializedError):
        ampx.current()


def operations(trained):
    """The operations of a training step, those of its branches included, by type."""
    data = tf.ones((4, 64)), tf.zeros((4, 1))
    graph = tf.function(lambda: trained.train_step(data)).get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return Counter(node.op for node in nodes)


def test_a_step_of_fit_has_the_operations_of_one_edited_by_hand(start):
    """So it takes as long: what `ampx run` adds is Python around a call of fit."""
    _, region = start()
    with region:
        unedited = model()
        unedited.compile(optimizer=keras.optimizers.Adam(), loss="mse")
        dtypes = operations(unedited)
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        edited = model(dtype="float32")
        edited.compile(optimizer=amp.wrap_optimizer(keras.optimizers.Adam()), loss="mse")
        assert dtypes == operations(edited)
    plain = model()
    plain.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    assert dtypes != operations(plain)


@pytest.mark.parametrize("optimizer", ["sgd", {"class_name": "SGD", "config": {"learning_rate": 0.01}}])
def test_a_step_of_fit_that_overflows_is_skipped_and_recorded(start, optimizer):
    run, region = start("float16", graphs=False)
    x = np.ones((6, 64), "float32")
    x[2] = math.inf
    with region:
        ours = model()
        ours.compile(optimizer=optimizer, loss="mse")
        ours.fit(x, np.zeros((6, 1), "float32"), batch_size=1, shuffle=False, verbose=0)
    assert all(np.isfinite(weights).all() for weights in ours.get_weights())
    (seen,) = run.recorder.optimizers.values()
    assert 3 in seen.skipped
    assert seen.steps == 6
    assert seen.scales[0][1] == seen.initial_scale / 2


class SelfTrained(keras.Model):
    """Takes its own steps."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            difference = self(x) - y  # TensorFlow subtracts no float32 from bfloat16
            loss = tf.reduce_mean(tf.square(difference))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"error": loss}


def test_a_model_with_its_own_training_step_is_cast_as_a_graph(start):
    run, region = start()
    x = np.full((4, 64), VALUE, "float32")
    with region:
        ours = SelfTrained()
        ours.compile(optimizer=keras.optimizers.SGD(0.0))
        history = ours.fit(x, np.zeros((4, 1), "float32"), batch_size=4, epochs=2, verbose=0)
        assert ours.dense.compute_dtype == "float32"
        assert ours.predict(x, verbose=0)[0, 0] == 64.0
    assert history.history["error"][0] == 64.0**2
    assert run.recorder.steps == 2


@pytest.mark.each_value(False)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("traced", ["eager", "function", "compiled"])
def test_a_loop_over_tapes_trains_scales_and_skips(start, dtype, traced):
    """TensorFlow's rewriter leaves a function alone that XLA compiles: it trained in float32."""
    run, region = start(dtype, graphs=False)  # where the rewriter casts nothing, products are cast one by one
    variable = tf.Variable([8.0])
    with region:
        step = loop(variable, keras.optimizers.SGD(1.0), dtype)
        step = step if traced == "eager" else tf.function(step, jit_compile=traced == "compiled")
        true = [step(tf.constant(factor)) for factor in (1.0, math.inf, 2.0)]
        cast = ROUNDED[dtype]
        assert [true[0].numpy()[0], true[2].numpy()[0]] == [cast, 2 * cast]
        assert variable.numpy()[0] == np.float32(8.0) - np.float32(3 * cast)
    (seen,) = run.recorder.optimizers.values()
    assert (seen.steps, seen.skipped) == (3, [2])
    assert seen.scales == ([(2, 2.0**15)] if dtype == "float16" else [])
    assert {computed for _, computed in run.recorder.ops} == {dtype}
    step(tf.constant(math.inf))  # a step without ampx is not skipped
    assert not np.isfinite(variable.numpy()).all()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("before", [False, True], ids=["new", "called before"])
def test_a_function_that_computes_the_loss_alone_is_cast_the_first_time(start, dtype, before):
    _, region = start(dtype, graphs=False)
    values = tf.fill([64, 64], VALUE)
    product = tf.function(lambda: tf.matmul(tf.nn.relu(values), tf.eye(64)) + 0.0)
    with region:
        optimizer = keras.optimizers.SGD(1.0)
        if before:
            assert product()[0, 0] == VALUE
        with tf.GradientTape():
            assert product()[0, 0] == ROUNDED[dtype]
    assert product()[0, 0] == VALUE
    assert optimizer.iterations == 0


@pytest.mark.parametrize("way", ["tape", "train_step"])
@pytest.mark.parametrize("denied", [(), ("module:other",)], ids=["nothing denied", "a module denied"])
def test_where_the_rewriter_casts_nothing_a_run_computes_what_one_that_is_watched_does(monkeypatch, way, denied):
    monkeypatch.setattr(rewrite, "_works", lambda device, dtype: False)
    seen = []
    for watched in (False, True):
        run = Run("tensorflow", RunSettings("float16", "O1", "cpu", deny=denied, loss_scale=1.0, watched=watched))
        with offer(Registry().load("tensorflow"), Automation).automate(run):
            if way == "tape":
                variable = tf.Variable([8.0])
                step = tf.function(loop(variable, keras.optimizers.SGD(1.0), "float16"))
                seen.append(float(step(tf.constant(1.0))[0]))
            else:
                ours = SelfTrained()
                ours.compile(optimizer=keras.optimizers.SGD(0.0))
                ours.fit(np.full((4, 64), VALUE, "float32"), np.zeros((4, 1), "float32"), verbose=0)
                seen.append(float(ours.predict(np.full((1, 64), VALUE, "float32"), verbose=0)[0, 0]) / 64)
    assert seen == [ROUNDED["float16"]] * 2


def test_a_graph_of_tensorflow_1_that_nothing_can_cast_is_refused(monkeypatch):
    """It was made before its optimizer, so that products can no longer be cast one by one."""
    monkeypatch.setattr(rewrite, "_works", lambda device, dtype: False)
    run = Run("tensorflow", RunSettings("float16", "O1", "cpu"))
    with offer(Registry().load("tensorflow"), Automation).automate(run), tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[8.0])
        with pytest.raises(RunRefusedError, match="casts nothing"):
            v1.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(variable))


SMALL = 2.0**-10  # times the loss scale it fits into float16
PRODUCTS = {
    "MatMul": lambda x: tf.matmul(x[0, 0], np.eye(4, dtype="float32")),
    "BatchMatMulV2": lambda x: tf.matmul(x, tf.Variable(np.eye(4, dtype="float32"))[None, None]),
    "Einsum": lambda x: tf.einsum("abij,jk->abik", x, tf.eye(4)),
    "Conv2D": lambda x: tf.nn.conv2d(x, tf.Variable(np.eye(4, dtype="float32").reshape(1, 1, 4, 4)), 1, "SAME"),
    "Conv3D": lambda x: tf.nn.conv3d(x[None], tf.reshape(tf.eye(4), [1, 1, 1, 4, 4]), [1] * 5, "SAME"),
    "Conv2DBackpropInput": lambda x: tf.nn.conv2d_transpose(x, tf.eye(4)[None, None], x.shape, 1),
    "DepthwiseConv2DNative": lambda x: tf.nn.depthwise_conv2d(x, tf.ones([1, 1, 4, 1]), [1] * 4, "SAME"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_outside_of_functions_are_cast_and_the_script_sees_float32(start, kind, dtype):
    """Each gives its operand again, so that its result and its gradient tell what it computed in."""
    run, region = start(dtype, graphs=False)
    variable = tf.Variable(tf.fill([1, 2, 4, 4], VALUE))
    with region:
        optimizer = keras.optimizers.SGD(1.0)
        with tf.GradientTape() as tape:
            product = PRODUCTS[kind](variable * 1.0)
            loss = tf.reduce_sum(product * tf.stop_gradient(product)) * SMALL
        (gradient,) = tape.gradient(loss, [variable])
        optimizer.apply_gradients([(gradient, variable)])
    assert product.dtype == gradient.dtype == tf.float32
    assert set(product.numpy().flat) == {np.float32(ROUNDED[dtype])}
    assert set(gradient.numpy().flat) <= {np.float32(ROUNDED[dtype] * SMALL), np.float32(0.0)}
    assert run.recorder.ops[kind, dtype] >= 1
    assert {computed for _, computed in run.recorder.ops} == {dtype}


def test_what_the_script_computes_in_a_dtype_of_its_own_stays_in_it(start):
    run, region = start(graphs=False)
    variable = tf.Variable(tf.fill([2, 2], VALUE))
    with region:
        optimizer = keras.optimizers.SGD(1.0)
        with tf.GradientTape() as tape:
            wide = tf.matmul(tf.cast(variable, tf.float64), tf.eye(2, dtype=tf.float64))
            narrow = tf.matmul(tf.cast(variable, tf.float16), tf.eye(2, dtype=tf.float16))
            whole = tf.matmul(tf.constant([[3]]), tf.constant([[5]]))
            loss = tf.cast(tf.reduce_sum(wide), tf.float32)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    assert (wide.dtype, narrow.dtype, whole.dtype) == (tf.float64, tf.float16, tf.int32)
    assert wide.numpy()[0, 0] == np.float32(VALUE)
    assert "bfloat16" not in {computed for _, computed in run.recorder.ops}


@pytest.mark.parametrize("where", ["eager", "function", "session", "monitored session"])
def test_the_operations_told_are_those_that_ran(start, where):
    """Two products forward and three backward, the first of which has no gradient for its input."""
    run, region = start(graphs=where != "eager")
    in_session = where.endswith("session")
    with region, tf.Graph().as_default() if in_session else contextlib.nullcontext():
        weights = [v1.get_variable(name, initializer=np.ones((4, 4), "float32")) for name in "ab"]

        def forward():
            hidden = tf.nn.relu(tf.matmul(tf.ones((8, 4)) * 0.5, weights[0]))
            return tf.reduce_mean(tf.square(tf.matmul(hidden, weights[1])))

        if in_session:
            train = v1.train.GradientDescentOptimizer(0.1).minimize(forward())
            initialize = v1.global_variables_initializer()
            with v1.Session() if where == "session" else v1.train.MonitoredSession() as session:
                session.run(initialize)
                for _ in range(4):
                    session.run(train)
        else:
            optimizer = keras.optimizers.SGD(0.1)

            def step():
                with tf.GradientTape() as tape:
                    loss = forward()
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

            step = tf.function(step) if where == "function" else step
            for _ in range(4):
                step()
    assert run.recorder.sampled_steps == (1 if where == "function" else 3)
    products = Counter()
    for (kind, dtype), count in run.recorder.ops.items():
        products[dtype] += count
        assert kind in ("MatMul", "FusedMatMul")
    assert products == {"bfloat16": 5 * run.recorder.sampled_steps}


def test_gradients_that_belong_to_no_loss_are_left_alone(start):
    _, region = start("float16", graphs=False)
    with region:
        variable, x = tf.Variable([3.0]), tf.constant([2.0])
        optimizer = keras.optimizers.SGD(1.0)
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                value = variable * x * x
            slope = inner.gradient(value, x)  # as in a gradient penalty
            penalty = tf.reduce_sum(tf.square(slope))
        assert slope.numpy().tolist() == [12.0]
        optimizer.build([variable])
        assert outer.gradient(penalty, variable).numpy().tolist() == [2 * 12.0 * 4.0]
        scaled = outer.gradient(penalty, [variable], output_gradients=tf.constant(0.5))
        assert scaled[0].numpy().tolist() == [12.0 * 4.0]


@pytest.mark.each_value(False)
@pytest.mark.parametrize("interval", [0.0, math.inf], ids=["looks at every run", "looks at the end"])
@pytest.mark.parametrize("dtype", LOW)
def test_a_graph_of_tensorflow_1_is_cast_scaled_and_recorded(start, monkeypatch, dtype, interval):
    monkeypatch.setattr("ampx_tensorflow.run.tf1._LOOK_SECONDS", interval)
    run, region = start(dtype)
    with region, tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[8.0])
        factor, values = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [64, 64])
        product = tf.matmul(tf.nn.relu(values), tf.eye(64)) + 0.0
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        pairs = optimizer.compute_gradients(tf.reduce_sum(variable) * factor, [variable])
        train = optimizer.apply_gradients(pairs)
        with v1.Session(config=v1.ConfigProto(allow_soft_placement=True)) as session:
            session.run(v1.global_variables_initializer())
            assert session.run(product, {values: np.full((64, 64), VALUE)})[0, 0] == ROUNDED[dtype]
            for value in (1.0, 2.0, math.inf):
                session.run(train, {factor: value})
            assert session.run(variable).tolist() == [5.0]
    (seen,) = run.recorder.optimizers.values()
    assert (seen.kind, seen.steps, seen.skipped) == ("GradientDescentOptimizer", 3, [3])
    assert seen.scales == ([(3, 2.0**15)] if dtype == "float16" else [])


@pytest.mark.parametrize(
    ("name", "scale"),
    [("TF_ENABLE_AUTO_MIXED_PRECISION", 2.0**16), ("TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE", 1.0)],
)
def test_the_variables_of_the_environment_choose_graphs(start, monkeypatch, name, scale):
    run, region = start("float16")
    with region:
        monkeypatch.setenv(name, "1")  # in the script, as the blog did
        ours = model()
        ours.compile(optimizer="sgd", loss="mse")
        ours.fit(np.ones((1, 64), "float32") / 64, np.zeros((1, 1), "float32"), verbose=0)
        assert ours.layers[0].compute_dtype == "float32"
        assert ours.predict(np.full((1, 64), VALUE, "float32"), verbose=0).dtype == np.float32
    (seen,) = run.recorder.optimizers.values()
    assert (seen.initial_scale, seen.steps) == (scale, 1)


def test_the_old_recipe_runs_in_the_session_of_the_run(start):
    run, region = start()
    with region:
        opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.01))
        ours = model()
        ours.compile(optimizer=opt, loss="mse")
        assert ours.optimizer is opt
        ours.fit(np.ones((2, 64), "float32"), np.zeros((2, 1), "float32"), batch_size=1, verbose=0)
        assert run.amp is ampx.current()
    (seen,) = run.recorder.optimizers.values()
    assert (seen.kind, seen.initial_scale, seen.steps) == ("SGD", 2.0**15, 2)


def fitting(optimizer):
    """Trains four batches, of which the second overflows."""
    ours = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
    ours.compile(optimizer=optimizer, loss="mse")
    x = np.ones((8, 4), "float32")
    x[2:4] = np.inf
    ours.fit(x, np.zeros((8, 1), "float32"), batch_size=2, shuffle=False, verbose=0)


def looping(optimizer, decorate=lambda step: step):
    """The same with a tape, as scripts for Keras 2 have it."""
    layer = keras.layers.Dense(4)
    layer.build((2, 4))

    def step(x):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_mean(tf.square(tf.cast(layer(x), tf.float32))))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, layer.trainable_variables))
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    step = decorate(step)
    for number in range(4):
        step(tf.fill([2, 4], math.inf if number == 1 else 1.0))


@pytest.fixture(params=["session", "policy"])
def by_itself(request):
    """A script that starts mixed precision by itself: its dtype, and the optimizer that it makes."""
    described = devices.describe("cpu")
    computed = described.native | described.emulated
    if not computed:
        pytest.skip(f"no low precision here: {described.reason}")
    dtype, before = "float16" if "float16" in computed else "bfloat16", keras.config.dtype_policy()

    def begin():
        if request.param == "session":
            amp = ampx.init("tensorflow", dtype=dtype, device="cpu", loss_scale="dynamic", nan_loss="skip")
            return amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=ampx.LossScale(init_scale=2.0**15))
        keras.config.set_dtype_policy(f"mixed_{dtype}")
        return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.01))

    yield dtype, begin
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("train", [fitting, looping, lambda optimizer: looping(optimizer, tf.function)])
def test_what_a_script_starts_itself_is_the_headline(start, by_itself, train):
    """With dtype, operations, steps, skips and scale, as for any other script."""
    dtype, begin = by_itself
    run, region = start(graphs=False)
    with region:
        train(begin())
    finished = Finished(run.recorder, [run])
    finished.settle()
    assert headline(finished.to_json()).startswith(f"tensorflow in {dtype} on cpu, level O1")
    (seen,) = run.recorder.optimizers.values()
    assert (seen.kind, seen.initial_scale, seen.steps, seen.skipped) == ("SGD", 2.0**15, 4, [2])
    assert seen.scales == [(2, 2.0**14)]
    assert dtype in {computed for _, computed in run.recorder.ops}
    assert "by itself" in run.recorder.notes[-1]


def test_a_session_that_cast_nothing_is_no_headline_in_its_dtype(start, by_itself):
    """Graphs of TensorFlow 1 have no layers, which are what a session casts."""
    dtype, _ = by_itself
    run, region = start(graphs=False)
    with region, tf.Graph().as_default():
        amp = ampx.init("tensorflow", dtype=dtype, device="cpu", loss_scale="dynamic", nan_loss="skip")
        variable, factor = v1.get_variable("v", initializer=np.ones((4, 4), "float32")), v1.placeholder(tf.float32, [])
        loss = tf.reduce_sum(tf.matmul(variable, variable)) * factor
        train = amp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.01)).minimize(loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for value in (1.0, math.inf, 1.0):
                session.run(train, {factor: value})
    finished = Finished(run.recorder, [run])
    finished.settle()
    assert headline(finished.to_json()).startswith("tensorflow in float32 on cpu")
    (seen,) = run.recorder.optimizers.values()
    assert (seen.kind, seen.steps, seen.skipped) == ("GradientDescentOptimizer", 3, [2])
    assert {computed for _, computed in run.recorder.ops} == {"float32"}
    ampx.shutdown()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, with numpy 2
def test_files_hold_what_they_hold_without_ampx_and_training_goes_on_from_them(start, tmp_path):
    """With the slots of an optimizer and its counter, both ways; what Keras skips is a warning, here an error."""
    x, y = np.ones((4, 64), "float32") / 64, np.zeros((4, 1), "float32")

    def begin(path):
        ours = model()
        ours.compile(keras.optimizers.Adam(0.01), "mse")
        ours.fit(x, y, batch_size=2, verbose=0)
        ours.save(f"{path}.keras")
        ours.save_weights(f"{path}.weights.h5")
        return state(ours.optimizer)

    def go_on(path):
        loaded = keras.models.load_model(f"{path}.keras")
        seen = [state(loaded.optimizer)]
        loaded.fit(x, y, batch_size=2, verbose=0)
        loaded.load_weights(f"{path}.weights.h5")
        return loaded.optimizer, [*seen, state(loaded.optimizer)]

    def state(optimizer):
        raw = getattr(optimizer, "inner_optimizer", optimizer)
        return [variable.numpy().tolist() for variable in raw.variables]

    plain, automated = str(tmp_path / "plain"), str(tmp_path / "automated")
    without = begin(plain)
    run, region = start(graphs=False)
    with region:
        assert go_on(plain)[1] == [without, without]
        with_ampx = begin(automated)
    assert [seen.steps for seen in run.recorder.optimizers.values()] == [2, 2]
    optimizer, states = go_on(automated)
    assert type(optimizer) is keras.optimizers.Adam
    assert states == [with_ampx, with_ampx]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # as above
def test_files_of_hdf5_hold_the_optimizer_that_the_script_made(start, tmp_path):
    """Keras gives it its counter and learning rate back, and not its slots."""
    ours, path = model(), tmp_path / "model.h5"
    _, region = start(graphs=False)
    with region:
        ours.compile(keras.optimizers.SGD(0.25), keras.losses.MeanSquaredError())
        ours.optimizer.inner_optimizer.iterations.assign(2)
        ours.save(path)
        inside = keras.models.load_model(path).optimizer.inner_optimizer
    outside = keras.models.load_model(path).optimizer
    assert type(outside) is type(inside) is keras.optimizers.SGD
    assert [int(optimizer.iterations) for optimizer in (inside, outside)] == [2, 2]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # as above
def test_a_model_with_an_optimizer_that_was_wrapped_by_hand_goes_on_and_its_new_steps_are_counted(start, tmp_path):
    path, x, y = tmp_path / "model.keras", np.ones((6, 64), "float32") / 64, np.zeros((6, 1), "float32")
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        ours = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2), keras.layers.Dense(1, dtype="float32")])
        ours.compile(amp.wrap_optimizer(keras.optimizers.SGD(0.01)), "mse")
        ours.fit(x, y, batch_size=2, verbose=0)
        ours.save(path)
    run, region = start(graphs=False)
    with region:
        loaded = keras.models.load_model(path)
        loaded.fit(x, y, batch_size=3, verbose=0)
    assert int(loaded.optimizer.iterations) == 5
    (seen,) = run.recorder.optimizers.values()
    assert (seen.kind, seen.steps) == ("SGD", 2)
    assert run.recorder.ops == {("Dense", "bfloat16"): 1, ("Dense", "float32"): 1}
    finished = Finished(run.recorder, [run])
    finished.settle()
    assert headline(finished.to_json()).startswith("tensorflow in bfloat16 on cpu")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # as above
def test_weights_that_are_restored_undo_no_step_of_the_count(start, tmp_path):
    run, region = start(graphs=False)
    x, y = np.ones((4, 64), "float32") / 64, np.zeros((4, 1), "float32")
    with region:
        ours = model()
        ours.compile("sgd", "mse")
        ours.fit(x, y, batch_size=2, verbose=0)
        ours.save_weights(tmp_path / "early.weights.h5")
        ours.fit(x, y, batch_size=1, verbose=0)
        ours.load_weights(tmp_path / "early.weights.h5")
        ours.train_on_batch(x, y)
    assert int(ours.optimizer.iterations) == 3
    (seen,) = run.recorder.optimizers.values()
    assert seen.steps == 2 + 4 + 1


def test_an_activity_regularizer_of_a_cast_layer_is_added_to_the_loss(start):
    """Keras itself cannot add it: the penalty is in the layer's dtype, and the loss in float32."""
    _, region = start(graphs=False)
    with region:
        ours = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(2, kernel_initializer="ones", activity_regularizer=keras.regularizers.L1(0.5)),
                keras.layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        ours.compile(keras.optimizers.SGD(0.0), "mse")
        history = ours.fit(np.ones((2, 64), "float32"), np.zeros((2, 1), "float32"), batch_size=2, verbose=0)
    assert history.history["loss"] == [0.5 * 2 * 64]  # the mean over the batch of the sums of two outputs, each 64


@pytest.mark.parametrize("inside", [True, False])
def test_a_loop_over_a_dataset_in_a_function_is_not_cast_which_the_summary_says(start, inside):
    run, region = start()
    eye = tf.eye(64)
    dataset = tf.data.Dataset.from_tensors(tf.fill([64, 64], VALUE))
    with region:
        variable, optimizer = tf.Variable([0.0]), keras.optimizers.SGD(1.0)

        def step(values):
            with tf.GradientTape() as tape:
                product = tf.matmul(tf.nn.relu(values), eye) + 0.0
                loss = tf.reduce_sum(variable) * tf.stop_gradient(product[0, 0])
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

        @tf.function
        def train(batches):
            for values in batches:
                step(values)

        if inside:
            train(dataset)
        else:
            compiled = tf.function(step)
            for values in dataset:
                compiled(values)
    assert variable.numpy()[0] == np.float32(-VALUE if inside else -ROUNDED["bfloat16"])
    assert any("for … in dataset" in note for note in run.recorder.notes) == inside


def test_the_lines_by_hand_of_a_loop_are_those_of_a_tape(start):
    run, region = start(graphs=False)
    with region:
        loop(tf.Variable([8.0]), keras.optimizers.SGD(1.0), "bfloat16")(tf.constant(1.0))
    assert run.explain()[-1] == (
        "with ampx.scale_loss(loss, optimizer) as scaled: gradients = scaled.gradient(tape, variables)"
    )


def test_mixed_precision_of_the_script_is_refused(start):
    _, region = start()
    with pytest.raises(ampx.RunRefusedError, match="LossScaleOptimizer"), region:
        model().compile(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse")
    before = keras.config.dtype_policy()
    _, region = start()
    try:
        keras.config.set_dtype_policy("mixed_bfloat16")
        with pytest.raises(ampx.RunRefusedError, match="policy"), region:
            model().compile(optimizer="sgd", loss="mse")
    finally:
        keras.config.set_dtype_policy(before)


REPLICAS = """
import sys
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x, y = np.ones((8, 3), "float32"), np.zeros((8, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
if sys.argv[1] == "fit":
    x[6:] = np.inf  # the second replica's share of the second batch
    with strategy.scope():
        model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert all(np.isfinite(one).all() for one in model.get_weights())


def replica(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))


if sys.argv[1] == "loop":
    tf.function(lambda x, y: strategy.run(replica, (x, y)))(x, y)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code", "message"),
    [("fit", 0, "2 steps, 1 skipped"), ("loop", 3, "refused: the script applies gradients itself on several replicas")],
)
def test_fit_goes_on_several_replicas_and_a_loop_is_refused(start, tmp_path, way, code, message):
    start()  # skips where bfloat16 cannot be tried
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS)
    done = run_python("-m", "ampx", "run", "--dtype", "bfloat16", script, way)
    assert message in done.stderr
    assert done.returncode == code


def train(command, name):
    done = run_python(*command, PLAIN / f"{name}.py", check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    return np.array(facts["losses"]), facts["metric"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"), [("tensorflow_keras", 264), pytest.param("tensorflow_loop", 224, marks=pytest.mark.nightly)]
)
def test_an_unedited_program_is_as_accurate_as_in_float32(start, name, steps):
    start()  # skips where bfloat16 cannot be tried
    exact, exact_accuracy, _ = train([], name)
    mixed, accuracy, output = train(["-m", "ampx", "run", "--dtype", "bfloat16"], name)
    assert f"{steps} steps, 0 skipped" in output
    # Both operands and the result of a product are rounded by up to 2**-9: less than 2**-7 of the first loss.
    assert 0 < abs(mixed[0] - exact[0]) <= 2.0**-7 * exact[0]
    assert exact_accuracy > 0.92
    # Three standard deviations of the difference of two shares of 397 images.
    assert abs(accuracy - exact_accuracy) <= 3 * math.sqrt(2 * exact_accuracy * (1 - exact_accuracy) / 397)


class Losses(keras.callbacks.Callback):
    """The loss of every batch: Keras shows the mean of the epoch up to now, which is forgotten here."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs["loss"])


@pytest.mark.parametrize("style", ["fit", "several steps a call", "function", "gradients of a function", "eager"])
def test_the_curve_of_a_report_has_the_losses_that_the_script_sees(start, style):
    run, region = start(next((dtype for dtype in LOW if rewrite._works("cpu", dtype)), "float32"), graphs=False)
    curve = run.recorder.curve = LossCurve()
    x = np.random.default_rng(0).normal(size=(24, 64)).astype("float32") / 64
    y = x.sum(1, keepdims=True) + 1
    numbers = range(1, 13)
    with region:
        ours, optimizer, losses = model(), keras.optimizers.SGD(0.01), Losses()
        if style in ("fit", "several steps a call"):
            steps = 1 if style == "fit" else 4
            numbers = numbers[steps - 1 :: steps]
            ours.compile(optimizer, "mse", steps_per_execution=steps)
            ours.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=[losses])
        else:

            def gradients_of(features, targets):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((tf.cast(ours(features), tf.float32) - targets) ** 2)
                return loss, tape.gradient(loss, ours.trainable_variables)

            def step(features, targets):
                loss, gradients = gradients_of(features, targets)
                optimizer.apply_gradients(zip(gradients, ours.trainable_variables, strict=True))
                return loss

            if style == "function":
                step = tf.function(step)
            elif style == "gradients of a function":
                gradients_of = tf.function(gradients_of)
            losses.seen = [float(step(x[at : at + 2], y[at : at + 2])) for at in range(0, 24, 2)]
    assert len(set(losses.seen)) == len(numbers)
    assert [point[:2] for point in curve.points()] == [
        (number, pytest.approx(loss, rel=1e-5)) for number, loss in zip(numbers, losses.seen, strict=True)
    ]


def test_of_many_calls_of_a_function_the_curve_looks_at_some(start, monkeypatch):
    run, region = start(next((dtype for dtype in LOW if rewrite._works("cpu", dtype)), "float32"), graphs=False)
    curve = run.recorder.curve = LossCurve()
    monkeypatch.setattr("ampx.run.recorder.CURVE_POINTS", 4)
    looks = []
    monkeypatch.setattr(curve, "keep", lambda before, read, keep=curve.keep: (looks.append(before), keep(before, read)))
    x = np.arange(1.0, 21.0, dtype="float32")
    with region:
        weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(0.0)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = (weight - x) ** 2
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        for number in x:
            step(tf.constant(number))
    assert looks == [0, 1, 2, 3, 4, 6, 8, 12, 16]
    assert curve.points() == [(number, float(number) ** 2, None) for number in (1, 9, 17)]


def test_an_operation_that_nothing_here_can_keep_is_refused_before_anything_is_patched(start):
    before = patched()
    _, region = start(graphs=False, deny=("module:first", "MatMul"))
    with pytest.raises(RunRefusedError, match=r"allow and deny name 'MatMul'; accepted .*'module:name'"), region:
        raise AssertionError("the script ran")
    assert patched() == before
