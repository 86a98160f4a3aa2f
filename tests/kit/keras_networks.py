"""Two small networks of two products, whose steps tests look at as they are rewritten for GPUs."""

import keras
import tensorflow as tf


class Products(tf.Module):
    """Two products of plain variables, which the graph rewriter casts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 1]))

    def __call__(self, x):
        return tf.matmul(tf.nn.relu(tf.matmul(x, self.first)), self.second)


def layers():
    """Return a network of two products with a normalization between them."""
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.LayerNormalization()]
    )
    model.add(keras.layers.Dense(1))
    return model
