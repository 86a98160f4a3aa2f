"""A neural ODE moves positions of 10 m by 2 cm in each step of Euler's, which is less than bfloat16 can add to them."""

import json
import sys

import keras
import numpy as np
from keras import layers, ops

ORIGIN = 0.0 if "--twin" in sys.argv else 12.0


class Flow(layers.Layer):
    """Follow a learned velocity for one second."""

    steps = 32

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")
        self.bias = self.add_weight(shape=(shape[-1],), initializer="zeros", name="bias")

    def call(self, start):
        place = start
        for _ in range(self.steps):
            place = place + ops.tanh(ops.matmul(place, 0.1 * self.kernel) + self.bias) / self.steps
        return place


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((4,)), Flow(name="flow"), layers.Rescaling(1.0, -ORIGIN, dtype="float32", name="shift")]
)
model.compile(keras.optimizers.Adam(2e-2), "mse")
start = ORIGIN + np.random.default_rng(0).uniform(-1, 1, (32, 4)).astype("float32")
wind = np.array([0.7, -0.6, 0.5, -0.4], "float32")
history = model.fit(start, start + wind - ORIGIN, batch_size=32, epochs=20, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
