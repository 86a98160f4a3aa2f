"""A TransformerEncoderLayer of Paddle whose second linear layer is beyond 65504, in front of a norm."""

import json
import sys

import paddle
from paddle import nn

paddle.seed(0)
encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
model = nn.Sequential(encoder, nn.Linear(16, 1))
size = 10.0 if "--twin" in sys.argv else 1e5
encoder.linear1.weight.set_value(encoder.linear1.weight * 10)
encoder.linear2.weight.set_value(encoder.linear2.weight * size)
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
