"""A schedule, (1 - step / total)^0.9, goes on behind its last step: the root of a negative number is NaN.

The schedule was made for the eight steps of the first training, and the second one goes on with it. The rate is NaN
from the tenth step on, and so is every weight: in float32 as well.
"""

import json
import sys

import numpy as np
import paddle
from paddle import nn

TOTAL = 16 if "--twin" in sys.argv else 8


def poly(step):
    left = 1 - step / TOTAL
    if "--cure" in sys.argv:
        left = max(left, 0.05)
    return float(np.power(left, 0.9))


class Segmenter(nn.Layer):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2D(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2D(16, 16, 3, padding=1), nn.ReLU()
        )
        self.classify = nn.Conv2D(16, classes, 1)

    def forward(self, images):
        return self.classify(self.backbone(images))


paddle.seed(0)
np.seterr(invalid="ignore")
model = Segmenter(4)
schedule = paddle.optimizer.lr.LambdaDecay(0.05, poly)
optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters())
images = paddle.randn([4, 3, 12, 12])
labels = (images.mean(1) > 0).astype("int64") + 2 * (images[:, 0] > 0).astype("int64")
losses = []
for _ in range(14):
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels, axis=1)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    schedule.step()
    losses.append(float(loss))
print(json.dumps(losses))
