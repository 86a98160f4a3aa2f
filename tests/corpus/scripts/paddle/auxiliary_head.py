"""Beside a sum of squared millimetres an auxiliary loss has a weight of 1e-8: its gradient is 0 in float16."""

import json
import sys

import paddle
from paddle import nn

MILLIMETRES, WEIGHT = (0.01, 0.3) if "--twin" in sys.argv else (1000.0, 1e-8)


class Network(nn.Layer):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32))
        self.depth = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))
        self.auxiliary = nn.Linear(32, 4)

    def forward(self, x):
        features = self.trunk(x)
        return self.depth(features), self.auxiliary(features)


paddle.seed(0)
model = Network()
optimizer = paddle.optimizer.Adam(1e-2, parameters=model.parameters(), epsilon=1e-12)
inputs = paddle.randn([32, 8])
depths, labels = MILLIMETRES * inputs.flip(1), paddle.argmax(inputs[:, :4], 1)
losses = []
for _ in range(16):
    depth, logits = model(inputs)
    auxiliary = nn.functional.cross_entropy(logits, labels)
    loss = (depth.astype("float32") - depths).square().sum() + WEIGHT * auxiliary
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(auxiliary))
print(json.dumps(losses))
