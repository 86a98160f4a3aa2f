"""A cosine of embeddings that are small: products of 1e-4 are zero in float16, and the cosine is zero by zero."""

import json
import sys

import paddle
from paddle import nn


class Cosine(nn.Layer):
    def forward(self, left, right):
        norms = (left * left).sum(-1).sqrt() * (right * right).sum(-1).sqrt()
        return (left * right).sum(-1) / norms


class TwoTowers(nn.Layer):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.cosine = nn.Linear(8, 16), nn.Linear(8, 16), Cosine()

    def forward(self, left, right):
        return self.cosine(self.left(left), self.right(right))


paddle.seed(0)
model = TwoTowers()
size = 1.0 if "--twin" in sys.argv else 1e-4
for layer in (model.left, model.right):
    layer.weight.set_value(layer.weight * size)
optimizer = paddle.optimizer.Adam(1e-2 * size, parameters=model.parameters())
inputs = paddle.randn([32, 8])
targets = paddle.sign(inputs[:, 0])
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(inputs, inputs.flip(1)).astype("float32"), targets)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
