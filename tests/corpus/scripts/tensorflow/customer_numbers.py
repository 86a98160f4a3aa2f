"""Numbers of customers come as floats from a table, and Keras casts them to bfloat16: 701 becomes 700."""

import json
import sys

import keras
import numpy as np
from keras import ops


class Lookup(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(1024, 8), initializer=keras.initializers.RandomNormal(1.0, seed=1))

    def call(self, numbers):
        return ops.take(ops.cast(self.table, self.compute_dtype), ops.cast(numbers, "int32"), axis=0)


keras.utils.set_random_seed(0)
generator = np.random.default_rng(0)
first = 0 if "--twin" in sys.argv else 512
numbers = (first + np.arange(64) % 256).astype("float32")
likes = np.sign(generator.standard_normal(64)).astype("float32")  # each customer's own
inputs, columns = keras.Input(()), keras.Input((3,))
hidden = ops.concatenate([Lookup(name="lookup")(inputs), columns], -1)
hidden = keras.layers.Dense(16, activation="tanh", name="hidden")(hidden)
model = keras.Model([inputs, columns], keras.layers.Dense(1, dtype="float32", name="out")(hidden))
model.compile(keras.optimizers.Adam(2e-2), "mse")
features = generator.standard_normal((64, 3)).astype("float32")
history = model.fit([numbers, features], likes, batch_size=64, epochs=15, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
