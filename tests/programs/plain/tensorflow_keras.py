"""Digits with compile and fit of Keras."""

import argparse
import json
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits


def main():
    """Train and test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()

    keras.utils.set_random_seed(11)
    digits = load_digits()
    images, labels = (digits.data / 16.0).astype("float32"), digits.target
    order = np.random.RandomState(11).permutation(len(images))
    images, labels = images[order], labels[order]

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(args.width, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(args.width, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    losses = []
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    follow = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: losses.append(float(logs["loss"])))
    model.compile(
        optimizer=keras.optimizers.Adam(0.001, global_clipnorm=1.0),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(
        images[:1400],
        labels[:1400],
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=[schedule, follow],
        verbose=2,
    )
    _, accuracy = model.evaluate(images[1400:], labels[1400:], verbose=0)
    sys.stdout.write(json.dumps({"losses": losses, "metric": float(accuracy)}) + "\n")


if __name__ == "__main__":
    main()
