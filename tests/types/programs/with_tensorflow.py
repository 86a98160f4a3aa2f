"""A Keras script. A line with `# error` must be an error; every other line must be none."""

import keras
import tensorflow as tf
from typing_extensions import assert_type

import ampx

amp = ampx.init(framework="tensorflow", dtype=tf.bfloat16)
model = keras.Sequential([keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
optimizer = ampx.wrap_optimizer(optimizer)
model.compile(optimizer=optimizer, loss="mse")
wrapped = ampx.wrap_optimizer(keras.optimizers.Adam(0.1), loss_scale="dynamic")
assert_type(ampx.last_step(wrapped), ampx.StepResult | None)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(model(tf.ones((2, 4))))
    with ampx.scale_loss(loss, wrapped) as scaled:
        pass
gradients = tape.gradient(scaled, model.trainable_variables)
wrapped.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
ampx.init("tensorflow", level="O9")  # error: no level
ampx.wrap_optimiser(optimizer)  # error: misspelt
