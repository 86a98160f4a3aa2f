"""Train a network in MXNet to read handwritten digits; nothing here knows of mixed precision."""

import argparse
import importlib

import numpy as np
from sklearn.datasets import load_digits

np.bool = bool  # NumPy 1.24 removed this name, and the import of MXNet 1.9.1 needs it
mx = importlib.import_module("mxnet")
gluon = mx.gluon

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--damaged", action="store_true", help="a picture of the fourth batch has a pixel without a value")
options = parser.parse_args()
mx.random.seed(0)

digits = load_digits()  # 1797 images of 8 by 8 pixels, which come with scikit-learn
random = np.random.default_rng(0)


class Standardize(gluon.HybridBlock):
    """Bring each row to mean 0 and variance 1."""

    def hybrid_forward(self, F, x):  # noqa: N803 -- MXNet's name
        mean = F.mean(x, axis=-1, keepdims=True)
        variance = F.broadcast_sub(F.mean(x * x, axis=-1, keepdims=True), mean * mean)
        return F.broadcast_div(F.broadcast_sub(x, mean), F.sqrt(variance + 1e-3))


network = gluon.nn.HybridSequential()
network.add(gluon.nn.Dense(256, activation="relu", in_units=64))
network.add(Standardize())
network.add(gluon.nn.Dense(256, activation="relu", in_units=256))
network.add(gluon.nn.Dense(10, in_units=256))
network.initialize(mx.init.Xavier())
network.hybridize()
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(network.collect_params(), "adam", {"learning_rate": 1e-3})

for step in range(options.steps):
    rows = random.integers(len(digits.data), size=128)
    images = mx.nd.array(digits.data[rows] * 256)  # as a camera of 12 bits has them
    if options.damaged and step == 3:
        images[5, 20] = float("nan")
    with mx.autograd.record():
        losses = loss_function(network(images), mx.nd.array(digits.target[rows]))
        losses.backward()
    trainer.step(128)
    if step % 5 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {losses.mean().asscalar():.3f}", flush=True)
