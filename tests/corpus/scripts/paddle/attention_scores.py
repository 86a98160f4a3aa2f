"""Attention that is written without the division by the root of the head's size: scores are beyond 65504."""

import json
import sys

import paddle
from paddle import nn


class Attention(nn.Layer):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        scores = paddle.matmul(self.query(x), self.key(x), transpose_y=True)
        return paddle.matmul(nn.functional.softmax(scores), self.value(x))


paddle.seed(0)
attention = Attention()
model = nn.Sequential(attention, nn.Linear(16, 1))
size = 5.0 if "--twin" in sys.argv else 150.0
for layer in (attention.query, attention.key):
    layer.weight.set_value(layer.weight * size)
optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
inputs, targets = paddle.randn([4, 6, 16]), paddle.randn([4, 6, 1])
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
