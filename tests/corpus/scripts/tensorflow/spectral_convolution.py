"""A Fourier neural operator: TensorFlow has no Fourier transform of float16, and raises."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class SpectralConvolution(layers.Layer):
    """Multiply the lowest frequencies of a signal by weights."""

    modes = 4

    def build(self, shape):
        width = shape[-1]
        self.real = self.add_weight(shape=(self.modes, width, width), name="real")
        self.imaginary = self.add_weight(shape=(self.modes, width, width), name="imaginary")

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        signal = tf.transpose(x, (0, 2, 1))
        if "--twin" in sys.argv:
            signal = tf.cast(signal, "float32")
        waves = tf.signal.rfft(signal)[..., : self.modes]
        weights = tf.complex(tf.cast(self.real, "float32"), tf.cast(self.imaginary, "float32"))
        mixed = tf.pad(tf.einsum("bim,mio->bom", waves, weights), [[0, 0], [0, 0], [0, 9 - self.modes]])
        return tf.cast(tf.transpose(tf.signal.irfft(mixed), (0, 2, 1)), x.dtype)


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((16, 1)),
        layers.Dense(4, name="lift"),
        SpectralConvolution(name="spectral"),
        layers.Activation("gelu", name="gelu"),
        layers.Dense(1, dtype="float32", name="project"),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), "mse")
place = np.linspace(0, 2 * np.pi, 16, endpoint=False)
phases = np.random.default_rng(0).uniform(0, 6, (8, 1))
starts, ends = np.sin(place + phases)[..., None], 0.5 * np.sin(place + phases - 1)[..., None]
history = model.fit(starts, ends, batch_size=8, epochs=12, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
