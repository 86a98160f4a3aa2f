"""A network without norms at a learning rate a thousand times too large: it explodes in float32 as well."""

import json
import sys

import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(32, activation="relu", name="first"),
        keras.layers.Dense(32, activation="relu", name="second"),
        keras.layers.Dense(1, name="out"),
    ]
)
model.compile(keras.optimizers.SGD(1e-3 if {"--twin", "--cure"} & {*sys.argv} else 5.0), "mse")
samples = np.random.default_rng(0).standard_normal((32, 8)).astype("float32")
history = model.fit(samples, samples.sum(1, keepdims=True), batch_size=32, epochs=12, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
