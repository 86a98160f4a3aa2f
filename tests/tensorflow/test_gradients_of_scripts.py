"""`ampx run` with a loss scale: what a script sees of gradients, in every way, is what plain Python shows.

Each way trains a little and returns the numbers that it saw. The oracle is the same function in plain TensorFlow. The
scale is a power of two and nothing is cast, so that both are equal but for the order of sums.
"""

import contextlib
import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from ampx.backend import offer
from ampx.errors import RunRefusedError
from ampx.plugins import Registry
from ampx.run import Automation, LossCurve, Run, RunSettings

v1 = tf.compat.v1
BOUND = 1e-3  # between most true gradients and the same times the loss scale


def automated(scale=65536.0, dtype="float32", level="O0"):
    run = Run("tensorflow", RunSettings(dtype, level, "cpu", loss_scale=scale))
    return run, offer(Registry().load("tensorflow"), Automation).automate(run)


def clipped(gradient):
    return tf.clip_by_value(gradient, -BOUND, BOUND)


@tf.custom_gradient
def clip_backward(x):
    return tf.identity(x), clipped


class Method:
    @tf.custom_gradient
    def clip_backward(self, x):
        return tf.identity(x), clipped


class Net:
    """Two layers with something between them, and what trains them."""

    def __init__(self, between=clip_backward, optimizer=None):
        keras.utils.set_random_seed(0)
        self.first, self.last = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
        self.first.build((8, 3))
        self.last.build((8, 4))
        self.between = between
        self.variables = [*self.first.trainable_variables, *self.last.trainable_variables]
        self.optimizer = optimizer or keras.optimizers.SGD(0.5)
        self.batches = tf.constant(np.random.default_rng(0).standard_normal((4, 8, 3), "float32"))
        self.seen = []

    def forward(self, x):
        return self.last(self.between(self.first(x)))

    def loss(self, x):
        return tf.reduce_mean(tf.square(self.forward(x)))

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        gradients = tape.gradient(loss, self.variables)
        self.apply(gradients)
        return gradients

    def apply(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def train(self, step=None):
        for x in self.batches:
            self.seen += tf.nest.flatten((step or self.step)(x))
        return [np.asarray(number) for number in [*self.seen, *self.variables] if number is not None]


WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


# -- functions with a gradient of their own ---------------------------------------------------------------------


@way
def custom_gradient():
    return Net().train()


@way
def custom_gradient_of_a_method():
    return Net(Method().clip_backward).train()


@way
def custom_gradient_of_keras():
    return Net(keras.ops.custom_gradient(lambda x: (tf.identity(x), lambda upstream: clipped(upstream)))).train()


@way
def custom_gradient_in_a_function():
    net = Net()
    return net.train(tf.function(net.step))


@way
def custom_gradient_that_is_made_in_a_function():
    def between(x):
        @tf.custom_gradient
        def clip(x):
            def gradient(upstream):
                return clipped(upstream)

            return tf.identity(x), gradient

        return clip(x)

    net = Net(between)
    return net.train(tf.function(net.step))


@way
def custom_gradient_that_xla_compiles():
    net = Net()
    return net.train(tf.function(net.step, jit_compile=True))


@way
def custom_gradient_in_a_function_inside_of_the_tape():
    net = Net()
    net.forward = tf.function(net.forward)
    return net.train()


@way
def custom_gradient_in_a_function_inside_of_a_function():
    net = Net(tf.function(clip_backward))
    return net.train(tf.function(net.step))


@way
def custom_gradient_in_a_loop():
    def between(x):
        for _ in tf.range(2):
            x = clip_backward(x)
        return x

    net = Net(tf.function(between))
    return net.train(tf.function(net.step))


@way
def custom_gradient_in_a_branch():
    net = Net(lambda x: tf.cond(tf.reduce_sum(x) > -100.0, lambda: clip_backward(x), lambda: x))
    return net.train(tf.function(net.step))


@way
def custom_gradient_that_is_recomputed():
    return Net(tf.recompute_grad(clip_backward)).train()


@way
def custom_gradient_in_a_python_function():
    def between(x):
        return tf.ensure_shape(tf.py_function(clip_backward, [x], tf.float32), x.shape)

    net = Net(between)
    return net.train(tf.function(net.step))


@way
def custom_gradient_with_variables():
    factor = tf.Variable(1.5)

    @tf.custom_gradient
    def between(x):
        def gradient(upstream, variables):
            (variable,) = variables
            return clipped(upstream) * variable, [clipped(tf.reduce_sum(upstream * x))]

        return x * factor, gradient

    net = Net(between)
    net.variables.append(factor)
    return net.train()


@way
def custom_gradient_that_differentiates():
    """As reversible networks do: the gradient function has a tape, and in it another such function."""

    @tf.custom_gradient
    def between(x):
        def gradient(upstream):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = clip_backward(x * 2.0)
            return clipped(tape.gradient(y, x, output_gradients=upstream)) * 0.5

        return x * 2.0, gradient

    return Net(between).train()


@way
def custom_gradient_in_a_penalty():
    """The gradient of a gradient, of which the script sees the inner one."""

    @tf.custom_gradient
    def cube(x):
        @tf.custom_gradient
        def gradient(upstream, x):
            return 3.0 * x**2 * upstream, lambda second: (clipped(second) * 3.0 * x**2, clipped(second) * 6.0 * x)

        return x**3, lambda upstream: gradient(upstream, x)

    net = Net(cube)

    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = net.forward(x)
            slope = inner.gradient(y, x)
            loss = tf.reduce_mean(y**2) + tf.reduce_mean(slope**2)
        gradients = tape.gradient(loss, net.variables)
        net.apply([tf.zeros(v.shape) if g is None else g for g, v in zip(gradients, net.variables, strict=True)])
        return [slope, gradients]

    return net.train(step)


@way
def custom_gradient_of_sparse_rows():
    table = tf.Variable(np.random.default_rng(1).standard_normal((5, 3), "float32"))
    rows = tf.constant([0, 3, 3])
    optimizer, seen = keras.optimizers.SGD(0.5), []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(clip_backward(tf.gather(table, rows)) ** 2)
        gradient = tape.gradient(loss, table)
        seen.append(tf.convert_to_tensor(gradient))
        optimizer.apply_gradients([(gradient, table)])
    return [np.asarray(number) for number in [*seen, table]]


@way
def custom_gradient_of_a_loss():
    net = Net(tf.identity)
    net.loss = lambda x: clip_backward(tf.reduce_mean(tf.square(net.forward(x))))
    return net.train()


class Clip(keras.layers.Layer):
    def call(self, x):
        return clip_backward(x)


def fitted(net, model, **options):
    model.compile(optimizer=net.optimizer, loss=lambda _, y: tf.reduce_mean(tf.square(y)), **options)
    for x in net.batches:
        model.fit(x, tf.zeros((8, 1)), batch_size=8, verbose=0)
    return [np.asarray(number) for number in net.variables]


@way
def custom_gradient_in_a_layer_of_a_compiled_model():
    net = Net()
    return fitted(net, keras.Sequential([keras.Input((3,)), net.first, Clip(), net.last]))


@way
def custom_gradient_in_a_layer_of_a_model_that_xla_compiles():
    net = Net()
    return fitted(net, keras.Sequential([keras.Input((3,)), net.first, Clip(), net.last]), jit_compile=True)


@way
def custom_gradient_in_a_model_with_a_step_of_its_own():
    net = Net()

    class Model(keras.Sequential):
        def train_step(self, data):
            (x, _), seen = data, net.seen
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            seen.append(tf.linalg.global_norm(gradients))
            return {"loss": loss}

    return fitted(net, Model([keras.Input((3,)), net.first, Clip(), net.last]))


def overridden(name):
    with contextlib.suppress(KeyError):  # registered once a process
        tf.RegisterGradient(name)(lambda operation, upstream: clipped(upstream))

    def between(x):
        with tf.compat.v1.get_default_graph().gradient_override_map({"Identity": name}):
            return tf.identity(x)

    return between


@way
def registered_gradient():
    net = Net(tf.function(overridden("ClipBackward")))  # a tape asks in functions inside of it only
    return net.train(tf.function(net.step))


# -- gradients as values ----------------------------------------------------------------------------------------


@way
def clipped_by_hand():
    net = Net(tf.identity)

    def step(x):
        with tf.GradientTape() as tape:
            loss = net.loss(x)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, net.variables), BOUND)
        net.apply(gradients)
        return norm

    return net.train(step)


@way
def gradients_of_activations():
    net = Net(tf.identity)

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            hidden = net.first(x)
            loss = tf.reduce_mean(tf.square(net.last(hidden)))
        net.apply(tape.gradient(loss, net.variables))
        return [tape.gradient(loss, hidden), tape.gradient([loss, loss], [hidden, *net.variables])]

    return net.train(step)


@way
def added_up_over_micro_batches():
    net, sums = Net(), []

    def step(x):
        with tf.GradientTape() as tape:
            loss = net.loss(x)
        sums.append(tape.gradient(loss, net.variables))
        if len(sums) % 2 == 0:
            net.apply([a + b for a, b in zip(*sums[-2:], strict=True)])
        return sums[-1]

    return net.train(step)


@way
def jacobian():
    net = Net()

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            y = net.forward(x)
            loss = tf.reduce_mean(tf.square(y))
        slopes = tape.jacobian(y, net.variables)
        net.apply(tape.gradient(loss, net.variables))
        return slopes

    return net.train(step)


@way
def batch_jacobian():
    net = Net()

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = net.forward(x)
            loss = tf.reduce_mean(tf.square(y))
        slopes = tape.batch_jacobian(y, x)
        net.apply(tape.gradient(loss, net.variables))
        return slopes

    return net.train(step)


@way
def symbolic_gradients():
    net = Net()

    def step(x):
        slopes = tf.gradients(net.loss(x), [variable.value for variable in net.variables])
        net.apply(slopes)
        return slopes

    return net.train(tf.function(step))


@way
def forward_mode():
    net = Net(tf.identity)

    def step(x):
        with tf.autodiff.ForwardAccumulator(net.variables[0].value, tf.ones((3, 4))) as accumulator:
            loss = net.loss(x)
        net.step(x)
        return accumulator.jvp(loss)

    return net.train(step)


# -- what optimizers do with gradients --------------------------------------------------------------------------


class Own(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(clipped(gradient), variable, learning_rate)

    def apply(self, grads, trainable_variables=None):
        return super().apply([None if grad is None else grad + clipped(grad) for grad in grads], trainable_variables)


for bound in ("clipnorm", "clipvalue", "global_clipnorm"):
    options = {bound: BOUND}
    WAYS[f"{bound}_of_an_optimizer"] = lambda options=options: Net(
        tf.identity, keras.optimizers.SGD(0.5, **options)
    ).train()
    WAYS[f"{bound}_of_an_optimizer_in_fit"] = lambda options=options: _fit_with(keras.optimizers.SGD(0.5, **options))


def _fit_with(optimizer):
    net = Net(optimizer=optimizer)
    return fitted(net, keras.Sequential([keras.Input((3,)), net.first, net.last]))


@way
def an_optimizer_of_the_scripts_own():
    return Net(tf.identity, Own(0.5)).train()


@way
def an_optimizer_of_the_scripts_own_in_fit():
    return _fit_with(Own(0.5))


@way
def accumulation_of_an_optimizer():
    return Net(tf.identity, keras.optimizers.SGD(0.5, gradient_accumulation_steps=2, clipvalue=BOUND)).train()


# -- graphs of TensorFlow 1 -------------------------------------------------------------------------------------


def graph(between, gradients_of):
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(0)
        x = v1.placeholder(tf.float32, (8, 3))
        values = np.random.default_rng(0)
        first = v1.get_variable("first", initializer=values.standard_normal((3, 4), "float32"), use_resource=True)
        last = v1.get_variable("last", initializer=values.standard_normal((4, 1), "float32"), use_resource=True)
        loss = tf.reduce_mean(tf.square(between(tf.tanh(x @ first)) @ last))
        optimizer = v1.train.GradientDescentOptimizer(0.5)
        pairs = gradients_of(optimizer, loss, [first, last])
        step = optimizer.apply_gradients(pairs)
        session.run(v1.global_variables_initializer())
        seen = []
        for batch in values.standard_normal((4, 8, 3), "float32"):
            *gradients, _ = session.run([*[gradient for gradient, _ in pairs], step], {x: batch})
            seen += gradients
        return [*seen, *session.run([first, last])]


def computed(optimizer, loss, variables):
    return [(clipped(gradient), variable) for gradient, variable in optimizer.compute_gradients(loss, variables)]


@way
def clipped_in_a_graph():
    return graph(tf.identity, computed)


@way
def custom_gradient_in_a_graph():
    return graph(clip_backward, lambda optimizer, loss, variables: optimizer.compute_gradients(loss, variables))


@way
def registered_gradient_in_a_graph():
    between = overridden("ClipBackwardInAGraph")
    return graph(between, lambda optimizer, loss, variables: optimizer.compute_gradients(loss, variables))


# -- what is saved ----------------------------------------------------------------------------------------------


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weights = tf.Variable(tf.ones((3, 2)))

    @tf.function(input_signature=[tf.TensorSpec((None, 3))])
    def __call__(self, x):
        y = x @ self.weights
        for _ in tf.range(2):
            y = clip_backward(y)
        return y


@way
def custom_gradient_in_a_saved_model(tmp_path):
    def gradient(module, variable):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(module(tf.ones((4, 3)))))
        return tape.gradient(loss, variable)

    optimizer, module, seen = keras.optimizers.SGD(0.5), Module(), []
    for _ in range(2):
        seen.append(gradient(module, module.weights))
        optimizer.apply_gradients([(seen[-1], module.weights)])
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    return [np.asarray(number) for number in [*seen, module.weights, gradient(loaded, loaded.weights)]]


@pytest.fixture(autouse=True)
def _restored():
    before = dict(vars(tf.GradientTape))
    yield
    assert dict(vars(tf.GradientTape)) == before


@pytest.mark.parametrize("name", WAYS)
def test_the_script_sees_what_plain_tensorflow_shows(name, tmp_path):
    train = WAYS[name]
    if "tmp_path" in inspect.signature(train).parameters:
        train = functools.partial(train, tmp_path)
    run, region = automated()
    with region:
        ours = train()
        assert run.amp.effective.loss_scale.init_scale == 65536.0
    plain = train()
    assert len(ours) == len(plain)
    for mine, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-9)


class Seen(keras.layers.Layer):
    """A layer that notes what its gradient function gets."""

    def build(self, shape):
        self.dtypes = []

    def call(self, x):
        @tf.custom_gradient
        def noted(x):
            def gradient(upstream):
                self.dtypes.append((x.dtype.name, upstream.dtype.name))
                return clipped(upstream) * tf.ones_like(x)

            return tf.identity(x), gradient

        return noted(x)


@pytest.mark.filterwarnings("ignore:.*emulated:ampx.errors.PrecisionWarning")
def test_a_gradient_function_in_a_float16_layer_gets_float32():
    """A true gradient of 2e-9 would be 0 in float16; so would what plain Keras's mixed_float16 makes of it."""
    _, region = automated(dtype="float16", level="O1")
    with region:
        seen, first = Seen(), keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), first, seen, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss=lambda _, y: tf.reduce_mean(y) * 2.0**-29)
        assert first.compute_dtype == "float16"
        before = first.bias.numpy()
        model.fit(tf.ones((2, 1)), tf.ones((2, 1)), batch_size=2, verbose=0)
    assert set(seen.dtypes) == {("float32", "float32")}
    assert (before - first.bias.numpy()).tolist() == [2.0**-29]


@pytest.mark.filterwarnings("ignore:.*emulated:ampx.errors.PrecisionWarning")
def test_a_registered_gradient_function_that_gets_float16_is_refused_before_the_first_step():
    _, region = automated(dtype="float16", level="O1")
    with region:
        first = keras.layers.Dense(4)
        model = keras.Sequential(
            [keras.Input((3,)), first, keras.layers.Lambda(tf.function(overridden("Low"))), Clip()]
        )
        model.add(keras.layers.Dense(1))
        model.compile(optimizer="sgd", loss="mse")
        before = first.get_weights()
        with pytest.raises(RunRefusedError, match=r"RegisterGradient.*float32"):
            model.fit(tf.ones((2, 3)), tf.ones((2, 1)), verbose=0)
    np.testing.assert_equal(first.get_weights(), before)


@pytest.fixture
def _no_checks():
    yield
    tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("compiled", [lambda function: function, tf.function], ids=["eager", "function"])
def test_a_tape_watches_variables_of_the_script_and_none_of_the_run(compiled):
    """Which the run has for the losses of a function, and for the loss scale that a gradient function asks for."""
    run, region = automated()
    run.recorder.curve = LossCurve()
    weight = tf.Variable(2.0)

    @tf.custom_gradient
    def doubled(x):
        return x * 2, lambda slope: slope * 2

    @compiled
    def watched(optimizer):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = doubled(weight)
            gradient = tape.gradient(loss, weight)
        optimizer.apply_gradients([(gradient, weight)])
        return [variable is weight for variable in outer.watched_variables()]

    with region:
        assert all(watched(keras.optimizers.SGD(0.25)))
    assert run.recorder.steps == 1
    assert weight == 1.5


@pytest.mark.usefixtures("_no_checks")
@pytest.mark.parametrize("scale", [65536.0, 1.0])
def test_checks_that_end_a_script_at_an_overflow_are_refused_where_losses_are_scaled(scale):
    _, region = automated(scale)
    with region:
        tf.debugging.enable_check_numerics()
        net = Net(tf.identity)
        if scale == 1.0:
            net.train()
        else:
            with pytest.raises(RunRefusedError, match=r"test_gradients_of_scripts.py:\d+: tf.debugging"):
                net.train()
            assert not net.optimizer.built


def test_a_dump_of_all_numbers_is_named_in_the_headline(tmp_path):
    run, region = automated()
    with region:
        tf.debugging.experimental.enable_dump_debug_info(str(tmp_path))
        try:
            Net(tf.identity).train()
        finally:
            tf.debugging.experimental.disable_dump_debug_info()
    (what,) = run.recorder.to_json()["scaled"]
    assert what.startswith("tf.debugging.experimental.enable_dump_debug_info (test_gradients_of_scripts.py:")
