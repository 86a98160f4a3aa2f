"""An RMSNorm by hand, which squares 300 in float16: beyond 65504, so that its output is zero."""

import json
import sys

import keras
import numpy as np


class RMSNorm(keras.layers.Layer):
    def call(self, x):
        return x * keras.ops.rsqrt(keras.ops.mean(keras.ops.square(x), -1, keepdims=True) + 1e-6)


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, name="first"), RMSNorm(name="rms"), keras.layers.Dense(1, name="second")]
)
model.compile(keras.optimizers.Adam(1e-2), "mse")
samples = np.random.default_rng(0).standard_normal((16, 8)).astype("float32") * (10 if "--twin" in sys.argv else 1500)
history = model.fit(samples, np.sign(samples[:, :1]), batch_size=16, epochs=8, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
