"""Train a network in PaddlePaddle with ampx to read handwritten digits: `digits_paddle.py` and a few lines."""

import argparse

import numpy as np
import paddle
from sklearn.datasets import load_digits

import ampx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument(
    "--dtype", default="auto", help="float32, bfloat16, float16, or auto: what this machine is made for"
)
options = parser.parse_args()
paddle.seed(0)
amp = ampx.init(framework="paddle", dtype=options.dtype, loss_scale="dynamic")

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
optimizer = ampx.wrap_optimizer(optimizer)

for step in range(options.steps):
    rows = random.integers(len(digits.data), size=options.batch_size)
    images = paddle.to_tensor(digits.data[rows] / 16, dtype="float32")
    loss = paddle.nn.functional.cross_entropy(model(images), paddle.to_tensor(digits.target[rows]))
    with ampx.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.clear_grad()
    if step % 10 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {float(loss):.3f}", flush=True)
print(f"in {amp.effective.dtype or 'float32'}: {optimizer.last_step}")
