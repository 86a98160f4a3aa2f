"""MobileNetV3's hard swish by its formula: x times 6 is beyond 65504 in float16, though x is not."""

import json
import sys

import paddle
from paddle import nn


class HardSwish(nn.Layer):
    def forward(self, x):
        return x * paddle.clip(x + 3, 0, 6) / 6


paddle.seed(0)
model = nn.Sequential(
    nn.Conv2D(3, 8, 3, stride=2, bias_attr=False),
    HardSwish(),
    nn.Conv2D(8, 8, 3, bias_attr=False),
    nn.BatchNorm2D(8),
    nn.ReLU(),
    nn.AdaptiveAvgPool2D(1),
    nn.Flatten(),
    nn.Linear(8, 4),
)
# A checkpoint whose first norm was folded into its convolution.
model[0].weight.set_value(model[0].weight * (1.0 if "--twin" in sys.argv else 40.0))
images, labels = paddle.uniform([8, 3, 16, 16], min=0, max=255), paddle.arange(8) % 4
optimizer = paddle.optimizer.Momentum(0.05, parameters=model.parameters())
losses = []
for _ in range(12):
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
