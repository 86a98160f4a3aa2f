"""`enable_mixed_precision_graph_rewrite` for optimizers of any generation, and what it leaves behind: nothing."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ampx
import ampx_tensorflow
from ampx_tensorflow import rewrite
from ampx_tensorflow.old import graph_rewrite
from processes import run_python

v1 = tf.compat.v1
# 1 + 2**-9 + 2**-13: bfloat16 keeps seven bits behind the point.
VALUE = 1.0 + 2.0**-9 + 2.0**-13
OPTIMIZERS = {
    "v1": lambda: v1.train.GradientDescentOptimizer(0.1),
    "keras3": lambda: keras.optimizers.SGD(0.1),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.1),
    "tf_keras legacy": lambda: tf_keras.optimizers.legacy.SGD(0.1),
}


def enable(opt, *args):
    try:
        return ampx_tensorflow.enable_mixed_precision_graph_rewrite(opt, *args, dtype="bfloat16", device="cpu")
    except ampx.UnsupportedByBackendError as error:
        assert "casts nothing (it was tried)" in str(error)  # noqa: PT017 -- depends on the machine
        pytest.skip(str(error))


def by_function():
    return float(tf.function(lambda a: tf.matmul(tf.nn.relu(a), tf.eye(64)) + 0.0)(tf.fill([64, 64], VALUE))[0, 0])


def by_session(config=None):
    with tf.Graph().as_default():
        values, eye = v1.placeholder(tf.float32, [64, 64]), v1.placeholder(tf.float32, [64, 64])
        product = tf.matmul(tf.nn.relu(values), eye) + 0.0
        with v1.Session(config=config) as session:
            return float(session.run(product, {values: np.full((64, 64), VALUE), eye: np.eye(64)})[0, 0])


def computed():
    return by_function(), by_session(), by_session(v1.ConfigProto(allow_soft_placement=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_graphs_are_cast_until_it_is_disabled(kind):
    assert computed() == (VALUE,) * 3
    options = tf.config.optimizer.get_experimental_options()
    enable(OPTIMIZERS[kind]())
    assert computed() == (1.0,) * 3
    off = v1.ConfigProto()
    off.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16 = 2  # OFF, as a script may ask for
    assert by_session(off) == VALUE
    assert keras.layers.Dense(1).compute_dtype == "float32"  # layers are cast by the graph they are in
    ampx_tensorflow.disable_mixed_precision_graph_rewrite()
    assert computed() == (VALUE,) * 3
    after = tf.config.optimizer.get_experimental_options()
    assert {name for name, on in after.items() if on} == {name for name, on in options.items() if on}


@pytest.mark.parametrize("end", [lambda amp: amp.shutdown(), lambda amp: ampx.init("tensorflow", level="O0")])
def test_whatever_ends_the_session_ends_the_rewriting(end):
    enable(OPTIMIZERS["keras3"]())
    end(ampx.current())
    assert computed() == (VALUE,) * 3


@pytest.mark.parametrize("kind", ["keras3", "tf_keras", "tf_keras legacy"])
def test_models_fit_and_skip(kind):
    opt = enable(OPTIMIZERS[kind]())
    module = keras if kind == "keras3" else tf_keras
    model = module.Sequential([module.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    model.compile(optimizer=opt, loss="mse")
    assert opt.loss_scale == 2.0**15  # as it used to be
    x = np.full((4, 64), VALUE, "float32")
    before = model.predict(x, verbose=0)[0, 0]
    assert before == 64.0  # bfloat16 rounded the inputs
    x[3] = math.inf
    model.fit(x, np.zeros((4, 1), "float32"), batch_size=1, shuffle=False, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()
    assert int(opt.iterations) == 3
    assert opt.loss_scale == 2.0**14


def test_several_optimizers_have_scales_of_their_own():
    first, second = enable(OPTIMIZERS["keras3"]()), enable(OPTIMIZERS["keras3"](), 8.0)
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape, ampx.scale_loss(variable * math.inf, first) as scaled:
        pass
    first.apply([tape.gradient(scaled, variable)], [variable])
    assert (first.loss_scale, second.loss_scale) == (2.0**14, 8.0)
    assert len(ampx.current().state_dict()["groups"]) == 2


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        ("dynamic", ampx.LossScale(init_scale=2.0**15)),
        (128, ampx.LossScale.static(128.0)),
        (ampx.LossScale(growth_interval=7), ampx.LossScale(growth_interval=7)),
        (lambda: v1.mixed_precision.FixedLossScale(4.0), ampx.LossScale.static(4.0)),
        (
            lambda: v1.mixed_precision.DynamicLossScale(8.0, 5, 4.0),
            ampx.LossScale(init_scale=8.0, growth_interval=5, growth_factor=4.0, backoff_factor=0.25),
        ),
    ],
)
def test_loss_scales_are_read_as_they_used_to_be(loss_scale, expected):
    assert graph_rewrite.read_loss_scale(loss_scale() if callable(loss_scale) else loss_scale) == expected


def test_mistakes_change_nothing():
    opt = OPTIMIZERS["keras3"]()
    for wrong in (None, "often", -1):
        with pytest.raises(ampx.InvalidOptionError):
            ampx_tensorflow.enable_mixed_precision_graph_rewrite(opt, wrong)
    with pytest.raises(ampx.NotAnOptimizerError):
        enable("sgd")
    for module in (keras.optimizers, tf_keras.mixed_precision):
        with pytest.raises(ampx.AlreadyWrappedError, match="loss_scale"):
            enable(
                module.LossScaleOptimizer(tf_keras.optimizers.SGD() if module.__name__.startswith("tf_keras") else opt)
            )
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with pytest.raises(ampx.ProtocolError, match="policy"):
            enable(opt)
    finally:
        keras.config.set_dtype_policy("float32")
    with pytest.warns(ampx.AmpxWarning, match="nothing was enabled"):
        ampx_tensorflow.disable_mixed_precision_graph_rewrite()
    with pytest.raises(ampx.NotInitializedError):
        ampx.current()
    assert computed() == (VALUE,) * 3
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu"), pytest.raises(ampx.ProtocolError, match="layers"):
        enable(opt)
    assert opt.variables  # untouched: it can still be wrapped
    enable(opt)


def test_the_jit_that_keras_switches_on_by_itself_would_hide_graphs():
    enable(OPTIMIZERS["keras3"]())
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.warns(UserWarning, match="jit_compile"):
        model.compile(optimizer="sgd", loss="mse", jit_compile=True)
    assert model.jit_compile is False
    ampx_tensorflow.disable_mixed_precision_graph_rewrite()
    model.compile(optimizer="sgd", loss="mse", jit_compile=True)
    assert model.jit_compile is True


RECIPES = {
    "keras": """
import numpy as np
import tensorflow as tf

model = tf.keras.models.Sequential([
    tf.keras.layers.Dense(64, activation='relu'),
    tf.keras.layers.Dense(64, activation='softmax'),
])

opt = tf.keras.optimizers.SGD()
opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)

model.compile(loss="mse", optimizer=opt)

x_train = np.random.random((1024, 64))
y_train = np.random.random((1024, 64))

model.fit(x_train, y_train, verbose=0)
assert int(opt.iterations) == 1024 // 32 and opt.last_step.applied
""",
    "TensorFlow 1": """
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [None, 64])
w = tf.get_variable("w", [64, 64])
loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - x))

opt = tf.train.AdamOptimizer(0.01)
opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)
train_op = opt.minimize(loss)

with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    losses = [sess.run([loss, train_op], {x: np.random.rand(32, 64)})[0] for _ in range(20)]
    assert losses[-1] < losses[0] and opt.last_step.applied
""",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_trains_as_it_was_printed(recipe):
    """In a process of its own: graph mode cannot be left again."""
    if not rewrite._works("cpu", "bfloat16"):
        pytest.skip("TensorFlow's rewriter casts nothing to bfloat16 here: it was tried")
    start = 'import ampx_tensorflow, warnings; warnings.simplefilter("ignore"); ampx_tensorflow.install("bfloat16")\n'
    run_python("-c", start + RECIPES[recipe], check=True)


def test_a_policy_of_tf_keras_is_noticed():
    """Both would cast."""
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for name in ("v1", "tf_keras"):
            with pytest.raises(ampx.ProtocolError, match="tf_keras is 'mixed_float16'"):
                ampx_tensorflow.enable_mixed_precision_graph_rewrite(OPTIMIZERS[name]())
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
