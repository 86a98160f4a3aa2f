"""A policy's log-probabilities as the logarithm of a softmax: in float16 a probability below 3e-8 is zero."""

import json
import sys

import keras
import numpy as np


class LogProbabilities(keras.layers.Layer):
    def call(self, x):
        return keras.ops.log_softmax(x) if "--twin" in sys.argv else keras.ops.log(keras.ops.softmax(x))


keras.utils.set_random_seed(0)
bias = keras.initializers.Constant([0.0, 20.0, 0.0, 0.0])
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="tanh", name="hidden"),
        keras.layers.Dense(4, name="logits", bias_initializer=bias),
        LogProbabilities(name="chances"),
        keras.layers.Activation("linear", dtype="float32", name="out"),
    ]
)
model.compile(keras.optimizers.Adam(1e-3), lambda chosen, chances: -keras.ops.sum(chosen * chances, -1))
samples = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")
chosen = np.eye(4, dtype="float32")[np.arange(8) % 4]
history = model.fit(samples, chosen, batch_size=8, epochs=8, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
