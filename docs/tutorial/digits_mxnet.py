"""Train a network in MXNet to read handwritten digits; nothing here knows of mixed precision."""

import argparse
import importlib

import numpy as np
from sklearn.datasets import load_digits

np.bool = bool  # NumPy 1.24 removed this name, and the import of MXNet 1.9.1 needs it
mx = importlib.import_module("mxnet")
gluon = mx.gluon

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--width", type=int, default=2048)
options = parser.parse_args()
mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()

digits = load_digits()  # 1797 images of 8 by 8 pixels, which come with scikit-learn
random = np.random.default_rng(0)

network = gluon.nn.HybridSequential()
network.add(gluon.nn.Dense(options.width, activation="relu", in_units=64))
network.add(gluon.nn.Dense(options.width, activation="relu", in_units=options.width))
network.add(gluon.nn.Dense(10, in_units=options.width))
network.initialize(mx.init.Xavier(), ctx=context)
network.hybridize()
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(network.collect_params(), "adam", {"learning_rate": 1e-4})

for step in range(options.steps):
    rows = random.integers(len(digits.data), size=options.batch_size)
    images = mx.nd.array(digits.data[rows] / 16, ctx=context)
    labels = mx.nd.array(digits.target[rows], ctx=context)
    with mx.autograd.record():
        losses = loss_function(network(images), labels)
        losses.backward()
    trainer.step(options.batch_size)
    if step % 10 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {losses.mean().asscalar():.3f}", flush=True)
