"""A gated feed-forward layer: gate and value are below 65504 each, and their product is not."""

import json
import sys

import paddle
from paddle import nn


class Gated(nn.Layer):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(nn.functional.relu(self.gate(x)) * self.up(x) * 1e-4)


paddle.seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), Gated(), nn.LayerNorm(16), nn.Linear(16, 1))
large = 5.0 if "--twin" in sys.argv else 220.0
for layer in (model[2].gate, model[2].up):
    layer.weight.set_value(layer.weight * large)
optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
inputs = paddle.randn([16, 8])
targets = inputs.mean(1, keepdim=True)
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(inputs).astype("float32"), targets)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
