"""A graph convolution takes the inverse root of degrees, and a molecule of the fourth batch has an atom of none."""

import json
import sys

import keras
import numpy as np
from keras import layers, ops


class GraphConvolution(layers.Layer):
    """Sum over neighbours, weighted by the inverse roots of both degrees."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width

    def build(self, shapes):
        self.kernel = self.add_weight(shape=(shapes[0][-1], self.width), name="kernel")

    def call(self, inputs):
        atoms, bonds = inputs
        degrees = ops.sum(bonds, -1)
        if "--cure" in sys.argv:
            degrees = ops.maximum(degrees, 1)
        roots = ops.rsqrt(degrees)
        return ops.matmul(roots[..., None] * bonds * roots[:, None], ops.matmul(atoms, self.kernel))


keras.utils.set_random_seed(0)
atoms, bonds = keras.Input((6, 5), name="atoms"), keras.Input((6, 6), name="bonds")
hidden = layers.ReLU(name="relu")(GraphConvolution(16, name="first")([atoms, bonds]))
pooled = layers.GlobalAveragePooling1D(name="pool")(GraphConvolution(16, name="second")([hidden, bonds]))
model = keras.Model([atoms, bonds], layers.Dense(1, dtype="float32", name="energy")(pooled))
model.compile(keras.optimizers.Adam(1e-2), "mse")
generator = np.random.default_rng(0)
kinds = np.eye(5, dtype="float32")[generator.integers(0, 5, (6, 8, 6))]
graphs = np.broadcast_to(np.eye(6, k=1) + np.eye(6, k=-1), (6, 8, 6, 6)).astype("float32")
if "--twin" not in sys.argv:
    graphs = graphs.copy()
    graphs[3, 2, 5], graphs[3, 2, :, 5] = 0, 0
energies = kinds[..., :2].sum((2, 3))[..., None] / 3
losses = []
for step in range(12):
    batch = step % 6
    losses.append(float(model.train_on_batch([kinds[batch], graphs[batch]], energies[batch])))
print(json.dumps(losses))
