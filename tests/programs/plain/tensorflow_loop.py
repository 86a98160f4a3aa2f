"""Digits with a loop over GradientTape, in a tf.function."""

import argparse
import json
import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


class Network(tf.keras.Model):
    """Two convolutions and a classifier."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.conv1 = tf.keras.layers.Conv2D(16, 3, activation="relu", padding="same")
        self.conv2 = tf.keras.layers.Conv2D(32, 3, activation="relu", padding="same", strides=2)
        self.flatten = tf.keras.layers.Flatten()
        self.classify = tf.keras.layers.Dense(10)

    def call(self, images):
        """Return logits."""
        return self.classify(self.flatten(self.conv2(self.conv1(images))))


def main():
    """Train and test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=50)
    args = parser.parse_args()

    tf.keras.utils.set_random_seed(13)
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[..., np.newaxis]
    order = np.random.RandomState(13).permutation(len(images))
    images, labels = images[order], digits.target[order].astype("int64")

    model = Network()
    optimizer = tf.keras.optimizers.Adam(0.002)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 5.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, norm

    data = tf.data.Dataset.from_tensor_slices((images[:1400], labels[:1400])).shuffle(1400, seed=13)
    losses = []
    for epoch in range(args.epochs):
        for x, y in data.batch(args.batch_size, drop_remainder=True):
            loss, norm = train_step(x, y)
            losses.append(float(loss))
        sys.stdout.write(f"epoch {epoch} loss {np.mean(losses[-28:]):.4f} norm {float(norm):.3f}\n")
    accuracy = np.mean(np.argmax(model(images[1400:]), axis=1) == labels[1400:])
    sys.stdout.write(json.dumps({"losses": losses, "metric": float(accuracy)}) + "\n")


if __name__ == "__main__":
    main()
