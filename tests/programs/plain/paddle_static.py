"""Train a multilayer perceptron on handwritten digits in a static graph."""

import argparse
import json

import numpy as np
import paddle
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

paddle.enable_static()
paddle.seed(args.seed)
digits = load_digits()
order = np.random.RandomState(args.seed).permutation(len(digits.target))
images = (digits.data[order] / 16.0).astype("float32")
labels = digits.target[order].astype("int64").reshape(-1, 1)

image = paddle.static.data("image", [None, 64], "float32")
label = paddle.static.data("label", [None, 1], "int64")
hidden = paddle.static.nn.fc(image, 128, activation="relu")
predict = paddle.static.nn.fc(hidden, 10)
loss = paddle.nn.functional.cross_entropy(predict, label)
correct = paddle.static.accuracy(paddle.nn.functional.softmax(predict), label)
optimizer = paddle.optimizer.Adam(0.003)
optimizer.minimize(loss)

executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(paddle.static.default_startup_program())
losses = []
for epoch in range(args.epochs):
    for start in range(0, 1344, args.batch_size):
        feed = {"image": images[start : start + args.batch_size], "label": labels[start : start + args.batch_size]}
        losses.append(executor.run(feed=feed, fetch_list=[loss])[0].item())
    print(f"epoch {epoch}, loss {losses[-1]:.4f}")
accuracy = executor.run(feed={"image": images[1344:], "label": labels[1344:]}, fetch_list=[correct])[0].item()
print(f"test accuracy: {accuracy:.4f}")
print(json.dumps({"losses": losses, "metric": accuracy}))
