"""A penalty of activity adds up the squares of a convolution's output, 147,000 of them: beyond 65504."""

import json
import sys

import keras
import numpy as np
from keras import ops


class ActivityPenalty(keras.layers.Layer):
    def __init__(self, weight, **options):
        super().__init__(**options)
        self.weight = weight

    def call(self, x):
        total = ops.sum(ops.square(x))
        self.add_loss(self.weight * ops.cast(total, "float32"))
        return x


class Encoder(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.stem = keras.layers.Conv2D(8, 1, activation="gelu", name="stem")
        self.penalty = ActivityPenalty(1e-6, name="penalty")
        self.shrink = keras.layers.Conv2D(4, 3, strides=8, activation="gelu", name="shrink")
        self.norm = keras.layers.LayerNormalization(name="norm")

    def call(self, x):
        return self.norm(self.shrink(self.penalty(self.stem(x))))


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder(name="encoder")
        self.pool = keras.layers.GlobalAveragePooling2D(name="pool")
        self.head = keras.layers.Dense(2, dtype="float32", name="head")

    def call(self, x):
        return self.head(self.pool(self.encoder(x)))


keras.utils.set_random_seed(0)
model = Classifier()
model.compile(keras.optimizers.Adam(5e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
size = 0.5 if "--twin" in sys.argv else 3.0
images = np.random.default_rng(0).normal(0, size, (8, 48, 48, 1)).astype("float32")
labels = np.arange(8) % 2
images[labels == 1, :24] += size
history = model.fit(images, labels, batch_size=8, epochs=10, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
