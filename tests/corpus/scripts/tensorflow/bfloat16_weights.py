"""A Keras model with the policy "bfloat16", weights included, at a rate of 1e-5: updates are rounded away."""

import json
import sys

import keras
import numpy as np

policy = None if {"--twin", "--cure"} & {*sys.argv} else "bfloat16"
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(32, activation="gelu", dtype=policy, name="up"),
        keras.layers.Dense(4, dtype=policy, name="down"),
        keras.layers.Activation("softmax", dtype="float32", name="chances"),
    ]
)
model.compile(keras.optimizers.Adam(1e-5), "sparse_categorical_crossentropy")
samples = np.random.default_rng(0).standard_normal((64, 16)).astype("float32")
history = model.fit(samples, np.arange(64) % 4, batch_size=64, epochs=30, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
