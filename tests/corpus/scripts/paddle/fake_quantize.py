"""Training aware of quantization on signals in volts: in float16 the step of the grid is zero."""

import json
import sys

import paddle
from paddle import nn


class FakeQuantize(nn.Layer):
    """Round to 16 bits and pass the gradient on."""

    def forward(self, x):
        step = x.detach().abs().max() / 32767
        return x + (paddle.floor(x / step + 0.5) * step - x).detach()


paddle.seed(0)
model = nn.Sequential(
    nn.Conv2D(1, 8, (1, 7), bias_attr=False),
    FakeQuantize(),
    nn.BatchNorm2D(8, epsilon=1e-12),
    nn.ReLU(),
    nn.AdaptiveAvgPool2D(1),
    nn.Flatten(),
    nn.Linear(8, 2),
)
volts = paddle.randn([16, 1, 4, 32]) * (1.0 if "--twin" in sys.argv else 5e-5)  # an electroencephalogram
labels = paddle.arange(16) % 2
volts *= 1 + labels.astype("float32").reshape([16, 1, 1, 1])
optimizer = paddle.optimizer.Adam(2e-2, parameters=model.parameters())
losses = []
for _ in range(12):
    loss = nn.functional.cross_entropy(model(volts), labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
