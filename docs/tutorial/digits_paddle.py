"""Train a network in PaddlePaddle to read handwritten digits; nothing here knows of mixed precision."""

import argparse

import numpy as np
import paddle
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--width", type=int, default=2048)
options = parser.parse_args()
paddle.seed(0)

digits = load_digits()  # 1797 images of 8 by 8 pixels, which come with scikit-learn
random = np.random.default_rng(0)

model = paddle.nn.Sequential(
    paddle.nn.Linear(64, options.width),
    paddle.nn.ReLU(),
    paddle.nn.Linear(options.width, options.width),
    paddle.nn.ReLU(),
    paddle.nn.Linear(options.width, 10),
)
optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())

for step in range(options.steps):
    rows = random.integers(len(digits.data), size=options.batch_size)
    images = paddle.to_tensor(digits.data[rows] / 16, dtype="float32")
    loss = paddle.nn.functional.cross_entropy(model(images), paddle.to_tensor(digits.target[rows]))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if step % 10 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {float(loss):.3f}", flush=True)
