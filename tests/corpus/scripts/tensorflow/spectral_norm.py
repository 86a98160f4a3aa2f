"""Keras's SpectralNormalization writes the weights back as bfloat16 in each step: small steps of Adam are lost."""

import json
import sys

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(0)
critic = keras.Sequential(
    [
        keras.Input((64,)),
        layers.SpectralNormalization(layers.Dense(32), name="spectral"),
        layers.LeakyReLU(0.2),
        layers.Dense(1, dtype="float32", name="score"),
    ]
)
critic.compile(keras.optimizers.Adam(2e-3 if "--twin" in sys.argv else 2e-4), "hinge")
generator = np.random.default_rng(0)
real = np.repeat([[1.0], [-1.0]], 16, axis=0).astype("float32")
samples = generator.standard_normal((32, 64)).astype("float32") + 0.5 * real
history = critic.fit(samples, real, batch_size=32, epochs=20, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
