"""Train a network in PaddlePaddle to read handwritten digits; nothing here knows of mixed precision."""

import argparse

import numpy as np
import paddle
from paddle import nn
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--damaged", action="store_true", help="a picture has a pixel without a value")
options = parser.parse_args()
paddle.seed(0)

digits = load_digits()  # 1797 images of 8 by 8 pixels, which come with scikit-learn
images = paddle.to_tensor(digits.data * 256, dtype="float32")  # as a camera of 12 bits has them
if options.damaged:
    images[5, 20] = float("nan")
labels = paddle.to_tensor(digits.target)
random = np.random.default_rng(0)


class Standardize(nn.Layer):
    """Bring each row to mean 0 and variance 1."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance + 1e-3).sqrt()


model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), Standardize(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())

for step in range(options.steps):
    rows = paddle.to_tensor(random.integers(len(digits.data), size=128))
    loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if step % 5 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {float(loss):.3f}", flush=True)
