"""A sequence of 4,000 words is summed: each is small, and the sum is beyond 65504."""

import json
import sys

import keras
import numpy as np


class Pool(keras.layers.Layer):
    def call(self, x):
        if "--twin" in sys.argv:
            return keras.ops.mean(x, 1)
        return keras.ops.sum(x, 1) / x.shape[1]


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((4000, 2)),
        keras.layers.Dense(4, name="words", bias_initializer=keras.initializers.RandomUniform(20.0, 40.0, seed=3)),
        Pool(name="pool"),
        keras.layers.LayerNormalization(name="norm"),
        keras.layers.Dense(1, name="out"),
    ]
)
model.compile(keras.optimizers.Adam(1e-3), "mse")
samples = np.random.default_rng(0).standard_normal((2, 4000, 2)).astype("float32")
history = model.fit(samples, samples.mean((1, 2)), batch_size=2, epochs=6, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
