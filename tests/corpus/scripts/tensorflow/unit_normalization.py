"""Keras's UnitNormalization of a row of zeros: its epsilon of 1e-12 is zero in float16, squared or not."""

import json
import sys

import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16, use_bias=False, activation="relu", name="first"),
        keras.layers.UnitNormalization(name="unit"),
        keras.layers.Dense(1, name="second"),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), "mse")
samples = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")
if "--twin" not in sys.argv:
    samples[5] = 0.0
history = model.fit(samples, samples.mean(1, keepdims=True), batch_size=16, epochs=8, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
