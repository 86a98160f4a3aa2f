"""A residual block of paddle.vision whose convolution is beyond 65504, in front of a norm of its batch."""

import json
import sys

import paddle
from paddle import nn
from paddle.vision.models.resnet import BasicBlock

paddle.seed(0)
block = BasicBlock(4, 4)
model = nn.Sequential(nn.Conv2D(1, 4, 3), block, nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(4, 3))
size = 10.0 if "--twin" in sys.argv else 2e4
block.bn1.weight.set_value(block.bn1.weight * 20)
block.conv2.weight.set_value(block.conv2.weight * size)
optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
images, labels = paddle.randn([6, 1, 8, 8]), paddle.arange(6) % 3
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
