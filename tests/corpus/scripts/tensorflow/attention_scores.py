"""Keras's MultiHeadAttention with keys and queries that have grown: their products are beyond 65504."""

import json
import sys

import keras
import numpy as np

keras.utils.set_random_seed(0)
inputs = keras.Input((10, 16))
attention = keras.layers.MultiHeadAttention(2, 8, name="attention")
hidden = attention(inputs, inputs)
outputs = keras.layers.Dense(1, name="out")(hidden)
model = keras.Model(inputs, outputs)
size = 5.0 if "--twin" in sys.argv else 300.0
for layer in (attention.query_dense, attention.key_dense):
    layer.kernel.assign(layer.kernel * size)
model.compile(keras.optimizers.Adam(1e-3), "mse")
samples = np.random.default_rng(0).standard_normal((4, 10, 16)).astype("float32")
history = model.fit(samples, samples.mean(-1, keepdims=True), batch_size=4, epochs=8, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
