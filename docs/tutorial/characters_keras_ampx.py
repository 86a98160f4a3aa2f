"""Train a network in Keras with ampx to guess the next character: `characters_keras.py` and a few lines."""

import argparse
import pydoc_data.topics

import keras
import numpy as np

import ampx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument(
    "--dtype", default="auto", help="float32, bfloat16, float16, or auto: what this machine is made for"
)
options = parser.parse_args()
keras.utils.set_random_seed(0)
amp = ampx.init(framework="tensorflow", dtype=options.dtype)  # before the layers: they compute in its dtype

text = "".join(pydoc_data.topics.topics.values())  # the language reference, which comes with Python
alphabet = sorted(set(text))
characters = np.searchsorted(alphabet, list(text))
context = 64
starts = np.random.default_rng(0).integers(len(characters) - context, size=options.steps * options.batch_size)
windows = characters[starts[:, None] + np.arange(context + 1)]

model = keras.Sequential(
    [
        keras.layers.Embedding(len(alphabet), 32),
        keras.layers.Flatten(),
        keras.layers.Dense(options.width, activation="relu"),
        keras.layers.Dense(options.width, activation="relu"),
        keras.layers.Dense(len(alphabet), dtype="float32"),  # the loss is computed from float32 logits
    ]
)
optimizer = ampx.wrap_optimizer(keras.optimizers.Adam(1e-3))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss)
history = model.fit(windows[:, :-1], windows[:, -1], batch_size=options.batch_size, shuffle=False, verbose=2)
print(f"in {amp.effective.dtype or 'float32'}: {optimizer.last_step}")
