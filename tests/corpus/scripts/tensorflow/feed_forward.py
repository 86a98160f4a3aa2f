"""A feed-forward block of Keras whose second layer is beyond 65504, in front of a norm."""

import json
import sys

import keras
import numpy as np

keras.utils.set_random_seed(0)
size = 10.0 if "--twin" in sys.argv else 1e4
inputs = keras.Input((8,))
hidden = keras.layers.Dense(
    32, activation="relu", name="up", kernel_initializer=keras.initializers.RandomNormal(stddev=10.0, seed=2)
)(inputs)
hidden = keras.layers.Dense(16, name="down", kernel_initializer=keras.initializers.RandomNormal(stddev=size, seed=1))(
    hidden
)
outputs = keras.layers.Dense(1, name="out")(keras.layers.LayerNormalization(name="norm")(hidden))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(1e-3), "mse")
samples = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")
history = model.fit(samples, samples.mean(1, keepdims=True), batch_size=16, epochs=8, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
