"""Small models in Keras with one planted fault each, and clean ones: for the tests and the benchmark of `diagnose`."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
X = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
ONES = np.ones((4, 3), "float32")


class Doing(layers.Layer):
    """A layer that does one thing to its input."""

    def __init__(self, function, name):
        super().__init__(name=name)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def chain(*middle):
    """A dense layer, what is planted, and a dense layer; a loss that float32 computes in the end."""
    first = layers.Dense(4, name="first", kernel_initializer="ones")
    last = layers.Dense(1, name="last", kernel_initializer="ones")
    return keras.Sequential([keras.Input((3,)), first, *middle, last])


def loss_of(inputs=ONES):
    def step(model):
        return tf.reduce_mean(tf.cast(model(tf.constant(inputs)), tf.float32))

    return step


def doing(function, name="planted"):
    return Doing(function, name)


@tf.custom_gradient
def overflows_backward(values):
    return values, lambda upstream: upstream * 1e3 * 1e3 * 1e-6


def attention_scores(values):
    queries = values * 200.0
    scores = tf.matmul(queries, queries, transpose_b=True)
    return tf.matmul(tf.nn.softmax(scores), values)


def masked(values):
    scores = values + tf.cast(tf.constant([0.0, 0.0, -1e9, 0.0]), values.dtype)
    return tf.nn.softmax(scores) * scores


def normalized(values):
    centred = (values - tf.reduce_mean(values, -1, keepdims=True)) * 1e-4
    return centred / tf.sqrt(tf.reduce_mean(centred * centred, -1, keepdims=True) + 1e-12)


def standardised(values):
    """Standardise by the variance that is a difference of large numbers."""
    mean = tf.reduce_mean(values, -1, keepdims=True)
    return values / tf.sqrt(tf.reduce_mean(values * values, -1, keepdims=True) - mean * mean)


def rotated(values):
    """Rotate by angles of late positions."""
    return values * tf.sin(tf.cast(tf.range(100_000, 100_004), values.dtype) * values)


def similar(values):
    """Return the cosine of the angle to a small vector, the product of the norms bounded from below."""
    small = values * 1e-5

    def norm(vector):
        return tf.sqrt(tf.reduce_sum(vector * vector, -1, keepdims=True))

    bounded = tf.maximum(norm(small) * norm(values), tf.cast(1e-8, values.dtype))
    return values * 0 + tf.reduce_sum(values * small, -1, keepdims=True) / bounded


def constant_image(values):
    return (values - tf.reduce_mean(values)) / tf.sqrt(tf.math.reduce_variance(values) + tf.cast(1e-8, values.dtype))


def focal(values):
    """The focal loss of predictions that are sure."""
    sure = tf.sigmoid(values * 4.0)
    return tf.pow(1.0 - sure, tf.cast(0.5, values.dtype)) * -tf.math.log(sure)


def lowest(values):
    """Mask by the lowest number of float32."""
    return tf.nn.softmax(values + tf.cast(tf.fill([4], tf.float32.min), values.dtype))


class Branches(keras.Model):
    """Three branches, the middle of which overflows."""

    def __init__(self):
        super().__init__(name="model")
        self.left = layers.Dense(2, name="left")
        self.planted = doing(lambda x: x * 3e4 * tf.cast(4.0, x.dtype))
        self.right = layers.Dense(3, name="right")

    def call(self, inputs):
        inputs = tf.cast(inputs, self.compute_dtype)
        return tf.concat([self.left(inputs), self.planted(inputs), self.right(inputs)], -1)


class Attending(layers.Layer):
    """Causal attention of a sequence to itself."""

    def __init__(self):
        super().__init__(name="attending")
        self.attention = layers.MultiHeadAttention(2, 4)

    def call(self, inputs):
        return self.attention(inputs, inputs, use_causal_mask=True)


def with_weights(value):
    model = chain()
    kernel = model.get_layer("last").kernel
    kernel.assign(tf.fill(kernel.shape, value))
    return model


BROKEN = ONES.copy()
BROKEN[2, 1] = np.nan

# Name: the model, the batch, the module, the kind, the direction; None where the fault is in no module.
FAULTS = {
    "forward overflow": (lambda: chain(doing(lambda x: x * x * 1e4)), ONES, "planted", "overflow", "forward"),
    "attention scores": (lambda: chain(doing(attention_scores)), ONES, "planted", "overflow", "forward"),
    "a sum": (
        lambda: chain(doing(lambda x: x * 0 + tf.cumsum(x * 6000.0, axis=-1)[:, -1:])),
        ONES,
        "planted",
        "sum",
        "forward",
    ),
    "backward overflow": (
        lambda: chain(doing(lambda x: x * 3e4 * 3e4)),
        ONES * 1e-6,
        "planted",
        "overflow",
        "backward",
    ),
    "custom function": (lambda: chain(doing(overflows_backward)), ONES, "planted", "overflow", "backward"),
    "epsilon": (
        lambda: chain(doing(lambda x: x / (x * 0 + tf.cast(1e-8, x.dtype)))),
        ONES,
        "planted",
        "epsilon",
        "forward",
    ),
    "mask": (lambda: chain(doing(masked)), ONES, "planted", "mask", "forward"),
    "log of zero": (
        lambda: chain(doing(lambda x: tf.math.log(x * 1e-4 * 1e-5))),
        ONES,
        "planted",
        "logarithm",
        "forward",
    ),
    "normalisation": (lambda: chain(doing(normalized)), X, "planted", "epsilon", "forward"),
    "NaN in a sample": (chain, BROKEN, None, "data", None),
    "weights": (lambda: with_weights(np.inf), ONES, None, "weights", None),
    "learning rate": (lambda: with_weights(1e38), ONES, None, "learning rate", None),
    "a variance as a difference": (
        lambda: chain(doing(lambda x: standardised(x + tf.cast([10.0, 10.1, 10.2, 10.3], x.dtype)))),
        ONES,
        "planted",
        "digits",
        "forward",
    ),
    "a mask of float32's lowest number": (lambda: chain(doing(lowest)), ONES, "planted", "mask", "forward"),
    "a position beyond the dtype": (lambda: chain(doing(rotated)), ONES, "planted", "overflow", "forward"),
    "logsumexp by hand": (
        lambda: chain(doing(lambda x: tf.math.log(tf.reduce_sum(tf.exp(x * 4.0), -1, keepdims=True)) + x * 0)),
        ONES,
        "planted",
        "overflow",
        "forward",
    ),
    "a temperature of 1e-4": (
        lambda: chain(doing(lambda x: tf.nn.softmax(x * 10.0 / 1e-4))),
        ONES,
        "planted",
        "overflow",
        "forward",
    ),
    "cosine similarity": (lambda: chain(doing(similar)), ONES, "planted", "epsilon", "forward"),
    "a constant image": (lambda: chain(doing(constant_image)), ONES, "planted", "epsilon", "forward"),
    "the focal factor of a sure prediction": (
        lambda: chain(doing(focal)),
        ONES,
        "planted",
        "digits",  # of the difference, which is why the root is at zero
        "backward",
    ),
    "a division by 0 in any precision": (
        lambda: chain(doing(lambda x: x / (x - x))),
        ONES,
        "planted",
        "division",
        "forward",
    ),
    "the derivative of a root at 0": (
        lambda: chain(doing(lambda x: tf.sqrt(tf.abs(tf.cast(x, tf.float32))))),
        ONES * 0,
        "planted",
        "logarithm",
        "backward",
    ),
    "a branch": (Branches, ONES, "planted", "overflow", "forward"),
    "float32 fails": (
        lambda: chain(doing(lambda x: tf.math.log(x * 0))),
        ONES,
        "planted",
        "logarithm",
        "forward",
    ),
}

CLEAN = {
    "dense": lambda: chain(),
    "relu": lambda: chain(layers.Dense(4, "relu")),
    "gelu": lambda: chain(layers.Dense(4, "gelu")),
    "layer normalization": lambda: chain(layers.LayerNormalization()),
    "batch normalization": lambda: chain(layers.BatchNormalization()),
    "dropout": lambda: chain(layers.Dropout(0.5)),
    "softmax": lambda: chain(layers.Softmax()),
    "nested": lambda: chain(keras.Sequential([layers.Dense(4), layers.Dense(4)])),
    "a mask that is meant": lambda: chain(
        doing(lambda x: tf.nn.softmax(tf.where([True, True, False, True], x, tf.cast(-np.inf, x.dtype))))
    ),
    "logarithm of what is not zero": lambda: chain(doing(lambda x: tf.math.log(tf.abs(x) + 1.0))),
    "attention": lambda: chain(layers.Reshape((2, 2)), layers.Lambda(lambda x: x), layers.Flatten()),
    "a masked attention": lambda: chain(layers.Reshape((2, 2)), Attending(), layers.Flatten()),
    "an LSTM and a GRU": lambda: chain(layers.Reshape((2, 2)), layers.LSTM(4, return_sequences=True), layers.GRU(4)),
    "convolutions": lambda: chain(
        layers.Reshape((2, 2, 1)),
        layers.SeparableConv2D(4, 2, padding="same"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ),
    "a bounded exponential": lambda: chain(doing(lambda x: tf.exp(-tf.nn.softplus(x)))),
    "a mask that fits": lambda: chain(
        doing(lambda x: tf.nn.softmax(tf.where([True, True, False, True], x, tf.cast(-1e4, x.dtype))))
    ),
    "a norm with an epsilon that fits": lambda: chain(
        doing(lambda x: x / (tf.norm(x, axis=-1, keepdims=True) + tf.cast(1e-3, x.dtype)))
    ),
}
