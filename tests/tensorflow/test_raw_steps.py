"""The raw optimizer is stepped although the wrapped one waits: an error, wherever it can be told."""

import copy

import keras
import pytest
import tensorflow as tf
import tf_keras

import ampx

v1 = tf.compat.v1
KINDS = {
    "keras": lambda: keras.optimizers.SGD(0.1),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.1),
    "tf_keras legacy": lambda: tf_keras.optimizers.legacy.SGD(0.1),
    "tf.compat.v1": lambda: v1.train.GradientDescentOptimizer(0.1),
}


@pytest.fixture(params=KINDS)
def pair(request, amp):
    """A raw optimizer and what wraps it."""
    raw = KINDS[request.param]()
    return raw, amp.wrap_optimizer(raw)


@pytest.fixture
def keras_pair(amp):
    raw = KINDS["keras"]()
    return raw, amp.wrap_optimizer(raw)


def scaled_gradient(opt, variable):
    with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable) * 1.0, opt) as scaled:
        pass
    return tape.gradient(scaled, variable)


def test_scaled_gradients_do_not_reach_the_raw_optimizer(pair):
    raw, opt = pair
    variable = tf.Variable([1.0])
    gradient = scaled_gradient(opt, variable)
    with pytest.raises(ampx.RawStepError, match="wrap_optimizer"):
        raw.apply_gradients([(gradient, variable)])
    assert variable.numpy().tolist() == [1.0]
    opt.apply_gradients([(gradient, variable)])
    assert variable.numpy()[0] == pytest.approx(0.9)


def test_it_steps_as_ever_where_nothing_waits(pair):
    raw, opt = pair
    variable, gradient = tf.Variable([1.0]), tf.constant([1.0])
    raw.apply_gradients([(gradient, variable)])
    scaled_gradient(opt, variable)
    opt.zero_grad()
    raw.apply_gradients([(gradient, variable)])
    assert variable.numpy()[0] == pytest.approx(0.8)


def test_other_optimizers_go_on(amp, pair):
    _, opt = pair
    other = keras.optimizers.SGD(0.1)
    wrapped = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    variable, mine = tf.Variable([1.0]), tf.Variable([1.0])
    scaled_gradient(opt, variable)
    other.apply_gradients([(tf.constant([1.0]), mine)])
    wrapped.apply_gradients([(scaled_gradient(wrapped, mine), mine)])
    assert mine.numpy()[0] == pytest.approx(0.8)


def test_a_raw_optimizer_outlives_its_wrapper(amp):
    raw, variable = KINDS["keras"](), tf.Variable([1.0])
    opt = amp.wrap_optimizer(raw)
    scaled_gradient(opt, variable)
    del opt
    raw.apply_gradients([(tf.constant([1.0]), variable)])
    assert variable.numpy()[0] == pytest.approx(0.9)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_that_scales_and_steps_the_raw_one_is_refused(keras_pair, compiled):
    raw, opt = keras_pair
    variable = tf.Variable([1.0])
    raw.build([variable])

    @tf.function(jit_compile=compiled)
    def step():
        raw.apply_gradients([(scaled_gradient(opt, variable), variable)])

    with pytest.raises(ampx.RawStepError):
        step()
    assert variable.numpy().tolist() == [1.0]


def test_one_function_scales_and_the_raw_one_steps_outside_of_it(keras_pair):
    raw, opt = keras_pair
    variable = tf.Variable([1.0])
    scale = tf.function(lambda: scaled_gradient(opt, variable))
    gradient = scale()
    with pytest.raises(ampx.RawStepError):
        raw.apply_gradients([(gradient, variable)])
    opt.apply_gradients([(gradient, variable)])
    raw.apply_gradients([(tf.constant([1.0]), variable)])
    assert variable.numpy()[0] == pytest.approx(0.8)


def test_a_function_scales_for_one_of_a_list_and_the_raw_one_of_another_steps(amp):
    raw, other = KINDS["keras"](), KINDS["keras"]()
    opt, _ = amp.wrap_optimizer([raw, other])
    variable, slope = tf.Variable([1.0]), tf.constant([1.0])
    tf.function(lambda: scaled_gradient(opt, variable))()
    other.apply_gradients([(slope, variable)])
    with pytest.raises(ampx.RawStepError):
        raw.apply_gradients([(slope, variable)])
    assert variable.numpy()[0] == pytest.approx(0.9)


@pytest.mark.parametrize("traced_before", [False, True])
def test_the_raw_one_steps_in_a_function_while_gradients_wait(keras_pair, traced_before):
    """Traced while they wait, it is an error of ampx; traced earlier, TensorFlow's assertion says it."""
    raw, opt = keras_pair
    variable, gradient = tf.Variable([1.0]), tf.constant([0.0])
    raw.build([variable])
    step = tf.function(lambda gradient: raw.apply_gradients([(gradient, variable)]))
    if traced_before:
        step(gradient)
    scaled = scaled_gradient(opt, variable)
    with pytest.raises(tf.errors.InvalidArgumentError if traced_before else ampx.RawStepError, match="pending"):
        step(scaled)
    assert variable.numpy().tolist() == [1.0]
    opt.apply_gradients([(scaled, variable)])
    step(tf.constant([1.0]))
    assert variable.numpy()[0] == pytest.approx(0.8)


def test_in_a_graph_of_tensorflow_1(amp):
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[1.0])
        raw = v1.train.GradientDescentOptimizer(0.1)
        opt = amp.wrap_optimizer(raw)
        with ampx.scale_loss(tf.reduce_sum(variable), opt) as scaled:
            gradients = tf.gradients(scaled, [variable])
        with pytest.raises(ampx.RawStepError):
            raw.apply_gradients([(gradients[0], variable)])
        train = opt.apply_gradients([(gradients[0], variable)])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            assert session.run(variable)[0] == pytest.approx(0.9)


def test_in_a_graph_of_tensorflow_1_it_still_waits_for_what_it_depends_on(amp):
    with tf.Graph().as_default():
        variable, done = v1.get_variable("v", initializer=[1.0]), v1.get_variable("done", initializer=False)
        raw = v1.train.GradientDescentOptimizer(0.5)
        opt = amp.wrap_optimizer(raw)
        with tf.control_dependencies([v1.assign(done, True)]):
            train = raw.apply_gradients([(tf.constant([1.0]), variable)])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            assert (session.run(variable).tolist(), session.run(done), opt.loss_scale) == ([0.5], True, 2.0**16)


def test_copies_and_fit_are_not_in_the_way(amp):
    """A copy of a raw optimizer belongs to nobody, and Keras trains with the raw one."""
    raw = KINDS["keras"]()
    opt = amp.wrap_optimizer(raw)
    variable, mine = tf.Variable([1.0]), tf.Variable([1.0])
    scaled_gradient(opt, variable)
    copy.deepcopy(raw).apply_gradients([(tf.constant([1.0]), mine)])
    assert (variable.numpy()[0], mine.numpy()[0]) == (1.0, pytest.approx(0.9))
    opt.zero_grad()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer=raw, loss="mse")
    model.fit(tf.ones((4, 2)), tf.zeros((4, 1)), verbose=0)
    assert float(model.weights[0][0, 0]) < 1.0
