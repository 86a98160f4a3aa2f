"""Which parameters have gradients that are not finite."""

import keras
import pytest
import tensorflow as tf

import ampx
from ampx import debug


def train(opt, model, factor, wrap=lambda step: step):
    @wrap
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones((1, 2)))) + tf.reduce_sum(model.layers[-1].bias) * factor
            with ampx.scale_loss(loss, opt) as scaled:
                pass
        opt.apply_gradients(
            zip(scaled.gradient(tape, model.trainable_variables), model.trainable_variables, strict=True)
        )

    step()


def network():
    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, name="inner"), keras.layers.Dense(4, name="outer")]
    )


def test_they_are_named_as_the_model_names_them_after_a_step_outside_of_functions(amp):
    model = network()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    train(opt, model, float("inf"))
    assert debug.nonfinite_parameters(opt) == [debug.NonFiniteParameter(model.layers[-1].bias.path, 4, 4)]
    assert debug.nonfinite_parameters(opt, model) == [debug.NonFiniteParameter("outer.bias", 4, 4)]
    train(opt, model, 1.0)
    assert debug.nonfinite_parameters(opt) == []


def test_after_a_step_of_a_function_that_is_refused_and_no_former_step_answers(amp):
    model = network()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    train(opt, model, float("inf"))
    train(opt, model, 1.0, tf.function)
    with pytest.raises(ampx.UnsupportedByBackendError, match="steps outside of functions"):
        debug.nonfinite_parameters(opt)
