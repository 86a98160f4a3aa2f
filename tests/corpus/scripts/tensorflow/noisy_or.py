"""A chance is clamped to 1 - 1e-6, which is 1 in bfloat16: the logarithm of 1 minus it has no finite slope."""

import json
import sys

import keras
import numpy as np
from keras import ops


class NoisyOr(keras.layers.Layer):
    """The chance that one sample of a bag at least is positive."""

    def call(self, scores):
        chances = ops.minimum(ops.sigmoid(scores[..., 0]), 1 - 1e-6)
        return 1 - ops.exp(ops.sum(ops.log1p(-chances), -1, keepdims=True))


keras.utils.set_random_seed(0)
size, rarity = (0.5, 1.0) if "--twin" in sys.argv else (3.0, 8.0)
bags = keras.Input((6, 8))
hidden = keras.layers.Dense(16, activation="tanh", name="hidden")(bags)
scores = keras.layers.Dense(
    1,
    kernel_initializer=keras.initializers.RandomNormal(stddev=size, seed=1),
    bias_initializer=keras.initializers.Constant(-rarity),
    name="scores",
)(hidden)
chances = NoisyOr(name="noisy_or")(scores)
model = keras.Model(bags, keras.layers.Activation("linear", dtype="float32", name="out")(chances))
model.compile(keras.optimizers.Adam(3e-3), "binary_crossentropy")
samples = np.random.default_rng(0).standard_normal((16, 6, 8)).astype("float32")
(first, _), (second, _) = model.get_layer("hidden").get_weights(), model.get_layer("scores").get_weights()
labels = ((np.tanh(samples @ first) @ second).max(1) > rarity).astype("float32")  # as the model has learned them
history = model.fit(samples, labels, batch_size=16, epochs=12, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
