"""One sample holds an infinity, as a division by a missing reading leaves it: float32 fails as well."""

import json
import sys

import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, activation="relu", name="hidden"), keras.layers.Dense(1, name="out")]
)
model.compile(keras.optimizers.Adam(1e-3), "mse")
samples = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
targets = samples.mean(1, keepdims=True)
if "--twin" not in sys.argv:
    samples[40, 3] = np.inf
if "--cure" in sys.argv:
    samples = np.nan_to_num(samples, posinf=0.0)
losses = [model.train_on_batch(samples[at : at + 16], targets[at : at + 16]) for at in range(0, 64, 16)]
print(json.dumps([float(loss) for loss in losses]))
