"""Train a network in Keras to guess the next character of a text; nothing here knows of mixed precision."""

import argparse
import pydoc_data.topics

import keras
import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--width", type=int, default=2048)
options = parser.parse_args()
keras.utils.set_random_seed(0)

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
        keras.layers.Dense(len(alphabet)),
    ]
)
optimizer = keras.optimizers.Adam(1e-3)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss)
history = model.fit(windows[:, :-1], windows[:, -1], batch_size=options.batch_size, shuffle=False, verbose=2)
