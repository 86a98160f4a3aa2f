"""Train a network in Keras to read handwritten digits; nothing here knows of mixed precision."""

import argparse

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
keras.utils.set_random_seed(0)

digits = load_digits()  # 1797 images of 8 by 8 pixels, which come with scikit-learn
images = np.float32(digits.data * 256)  # as a camera of 12 bits has them
rows = np.random.default_rng(0).integers(len(images), size=128 * options.steps)


class Standardize(layers.Layer):
    """Bring each row to mean 0 and variance 1."""

    def call(self, x):
        mean = ops.mean(x, -1, keepdims=True)
        variance = ops.mean(x * x, -1, keepdims=True) - mean * mean
        return (x - mean) / ops.sqrt(variance + 1e-3)


model = keras.Sequential(
    [
        layers.Dense(256, activation="relu"),
        Standardize(name="standardize"),
        layers.Dense(256, activation="relu"),
        layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)
model.fit(images[rows], digits.target[rows], batch_size=128, shuffle=False, verbose=2)
