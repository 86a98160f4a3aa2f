"""Digits with a custom training loop in the style of Keras 2: a policy, and a LossScaleOptimizer used by hand."""

import argparse
import json
import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def build():
    """A perceptron whose outputs are float32, as the guide said."""
    return tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
            tf.keras.layers.Activation("linear", dtype="float32"),
        ]
    )


def main():
    """Train and test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--policy", default="float32")
    args = parser.parse_args()

    tf.keras.mixed_precision.set_global_policy(args.policy)
    tf.keras.utils.set_random_seed(7)
    digits = load_digits()
    images, labels = (digits.data / 16.0).astype("float32"), digits.target.astype("int64")
    order = np.random.RandomState(7).permutation(len(images))
    images, labels = images[order], labels[order]

    model = build()
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.RMSprop(0.001)
    mixed = args.policy != "float32"
    if mixed:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x, training=True))
            scaled_loss = optimizer.get_scaled_loss(loss) if mixed else loss
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        if mixed:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    train = tf.data.Dataset.from_tensor_slices((images[:1400], labels[:1400])).shuffle(1400, seed=7)
    losses = []
    for epoch in range(args.epochs):
        for x, y in train.batch(args.batch_size, drop_remainder=True):
            losses.append(float(train_step(x, y)))
        sys.stdout.write(f"Epoch {epoch}, Loss: {np.mean(losses[-28:]):.4f}\n")
    classes = np.argmax(model.predict(images[1400:], verbose=0), axis=1)
    accuracy = float(np.mean(classes == labels[1400:]))
    sys.stdout.write(json.dumps({"losses": losses, "metric": accuracy}) + "\n")


if __name__ == "__main__":
    main()
