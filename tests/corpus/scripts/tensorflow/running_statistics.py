"""Observations in degrees, normalized by running sums: Keras hands a layer its sums in float16, and they overflow."""

import json
import sys

import keras
import numpy as np
from keras import layers, ops


class RunningNormalization(layers.Layer):
    """Normalize by mean and variance of all observations so far."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.total = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.squares = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(ops.ones(()) * ops.shape(x)[0])
            self.total.assign(self.total + ops.sum(x, 0))
            self.squares.assign(self.squares + ops.sum(ops.square(x), 0))
        mean = self.total / self.count
        return (x - mean) * ops.rsqrt(self.squares / self.count - ops.square(mean) + 1e-3)


keras.utils.set_random_seed(0)
policy = keras.Sequential(
    [
        keras.Input((6,)),
        RunningNormalization(name="normalize"),
        layers.Dense(16, activation="tanh", name="hidden"),
        layers.Dense(2, dtype="float32", name="action"),
    ]
)
policy.compile(keras.optimizers.Adam(1e-2), "mse")
generator = np.random.default_rng(0)
angles = generator.standard_normal((64, 6)).astype("float32")
actions = np.tanh(angles[:, :2] - angles[:, 2:4])
observations = angles if "--twin" in sys.argv else angles * 12
warm_up = keras.callbacks.LearningRateScheduler(lambda epoch: 1e-2 * min(1.0, (epoch + 1) / 5))
history = policy.fit(observations, actions, batch_size=64, epochs=20, shuffle=False, verbose=0, callbacks=[warm_up])
print(json.dumps(history.history["loss"]))
