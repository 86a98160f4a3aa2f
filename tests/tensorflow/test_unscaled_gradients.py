"""`get_scaled_loss` and `get_unscaled_gradients`, by which loops written for Keras 2 scale by hand."""

import math

import keras
import pytest
import tensorflow as tf
import tf_keras

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE

KINDS = {"keras3": keras.optimizers, "tf_keras": tf_keras.optimizers, "tf_keras legacy": tf_keras.optimizers.legacy}


@pytest.fixture(params=KINDS)
def wrapped(request, amp):
    return amp.wrap_optimizer(KINDS[request.param].SGD(1.0), loss_scale=ampx.LossScale(growth_interval=3))


def scaled_gradient(opt, variable, factor=1.0):
    with tf.GradientTape() as tape:
        scaled = opt.get_scaled_loss(tf.reduce_sum(variable) * factor)
    return tape.gradient(scaled, variable)


@pytest.mark.parametrize("traced", [False, True, "xla"])
def test_unscaled_by_hand_the_trace_is_the_reference(wrapped, traced):
    variable = tf.Variable([1.0, 2.0])

    def step(factor):
        (true,) = wrapped.get_unscaled_gradients([scaled_gradient(wrapped, variable, factor)])
        wrapped.apply_gradients([(true, variable)])

    run = tf.function(step, jit_compile=traced == "xla") if traced else step
    trace = []
    for overflow in REFERENCE_PATTERN:
        run(tf.constant(math.inf if overflow else 0.5))
        trace.append(wrapped.loss_scale)
    assert trace == list(REFERENCE_TRACE)
    applied = REFERENCE_PATTERN.count(0)
    assert variable.numpy().tolist() == [1.0 - 0.5 * applied, 2.0 - 0.5 * applied]


def test_gradients_are_divided_once(wrapped):
    variable = tf.Variable([8.0])
    wrapped.apply_gradients([(scaled_gradient(wrapped, variable), variable)])  # not unscaled by hand: apply does it
    assert variable.numpy().tolist() == [7.0]
    true = wrapped.get_unscaled_gradients([scaled_gradient(wrapped, variable), None])
    assert [None if gradient is None else gradient.numpy().tolist() for gradient in true] == [[1.0], None]
    with pytest.raises(ampx.ProtocolError, match="twice"):
        wrapped.get_unscaled_gradients(true)
    wrapped.apply_gradients([(true[0], variable)])
    assert variable.numpy().tolist() == [6.0]
    with pytest.raises(ampx.NotScaledError):
        wrapped.get_unscaled_gradients([tf.constant([1.0])])
    with pytest.raises(ampx.NotScaledError):
        wrapped.apply_gradients([(tf.constant([1.0]), variable)])


def test_true_gradients_of_several_batches_add_up(wrapped):
    variable, total = tf.Variable([8.0]), tf.zeros([1])
    for factor in (1.0, 2.0):
        total += wrapped.get_unscaled_gradients([scaled_gradient(wrapped, variable, factor)])[0]
    wrapped.apply_gradients([(total, variable)])
    assert variable.numpy().tolist() == [5.0]
    assert wrapped.last_step.applied


def test_one_function_may_unscale_and_another_step(wrapped):
    variable = tf.Variable([8.0])

    @tf.function
    def gradient(factor):
        return wrapped.get_unscaled_gradients([scaled_gradient(wrapped, variable, factor)])[0]

    for step in (lambda true: wrapped.apply_gradients([(true, variable)]),) * 2:
        step(gradient(tf.constant(1.0)))
    assert variable.numpy().tolist() == [6.0]
    traced = tf.function(lambda true: wrapped.apply_gradients([(true, variable)]))
    traced(gradient(tf.constant(1.0)))
    traced(gradient(tf.constant(math.inf)))
    assert variable.numpy().tolist() == [5.0]
    assert wrapped.last_step.applied is False


def test_disabled_it_is_transparent():
    with ampx.init("tensorflow", enabled=False) as amp:
        opt, variable = amp.wrap_optimizer(keras.optimizers.SGD(1.0)), tf.Variable([8.0])
        (true,) = opt.get_unscaled_gradients([scaled_gradient(opt, variable)])
        opt.apply_gradients([(true, variable)])
        assert variable.numpy().tolist() == [7.0]
