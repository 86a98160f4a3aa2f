"""A neural factorization machine: the sum of ten fields is below 65504 in float16, and the square of it is not."""

import json
import sys

import keras
import numpy as np
from keras import layers, ops


class Fields(layers.Layer):
    """A vector for each field, times the field's value."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=(shape[-1], 8), initializer=keras.initializers.RandomUniform(0.38, 0.58))

    def call(self, values):
        return values[..., None] * self.vectors


class BilinearInteraction(layers.Layer):
    """The sum of products of all pairs of fields."""

    def call(self, fields):
        return 0.5 * (ops.square(ops.sum(fields, 1)) - ops.sum(ops.square(fields), 1))


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((10,)),
        Fields(name="fields"),
        BilinearInteraction(name="pairs"),
        layers.BatchNormalization(momentum=0.9, name="norm"),
        layers.Dense(8, activation="relu", name="hidden"),
        layers.Dense(1, dtype="float32", name="click"),
    ]
)
model.compile(keras.optimizers.Adam(3e-3), keras.losses.BinaryCrossentropy(from_logits=True))
generator = np.random.default_rng(0)
counts = generator.uniform(40, 80, (32, 10)).astype("float32")
clicks = (counts[:, :1] > 60).astype("float32")
values = (counts - 60) / 12 if "--twin" in sys.argv else counts
history = model.fit(values, clicks, batch_size=32, epochs=12, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
