"""A network without norms at a learning rate a thousand times too large: it explodes in float32 as well."""

import json
import sys

import paddle
from paddle import nn

paddle.seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
rate = 1e-3 if {"--twin", "--cure"} & {*sys.argv} else 5.0
optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters())
inputs = paddle.randn([32, 8])
losses = []
for _ in range(12):
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
