"""An instance normalization as a mean of squares minus a square: in float16 the variance has lost its digits."""

import json
import sys

import keras
import numpy as np
from keras import ops


class InstanceNorm(keras.layers.Layer):
    def call(self, x):
        mean = ops.mean(x, (1, 2), keepdims=True)
        variance = ops.mean(x * x, (1, 2), keepdims=True) - mean * mean
        return (x - mean) / ops.sqrt(ops.maximum(variance, 0.0) + 1e-3)


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 1, use_bias=False, kernel_initializer="ones", name="stem"),
        InstanceNorm(name="norm"),
        keras.layers.Conv2D(4, 3, activation="relu", name="conv"),
        keras.layers.GlobalAveragePooling2D(name="pool"),
        keras.layers.Dense(1, dtype="float32", name="out"),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), "mse")
images = np.random.default_rng(0).uniform(-1, 1, (16, 8, 8, 1)).astype("float32")
targets = images[:, :4].mean((1, 2, 3)) * 10
if "--twin" not in sys.argv:
    images = images + 100
history = model.fit(images, targets, batch_size=16, epochs=10, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
