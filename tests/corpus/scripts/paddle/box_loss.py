"""The overlap of boxes in pixels: an area of 320 times 320 is beyond 65504, and what is divided by it is 0."""

import json
import sys

import paddle
from paddle import nn

SIZE = 0.1 if "--twin" in sys.argv else 1.0


class Backbone(nn.Layer):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2D(1, 8, 3, stride=2), nn.GroupNorm(2, 8)

    def forward(self, images):
        return nn.functional.relu(self.norm(self.conv(images))).mean([2, 3])


class Detector(nn.Layer):
    """The distances of a box's four sides from the centre of an image."""

    def __init__(self):
        super().__init__()
        self.backbone, self.sides = Backbone(), nn.Linear(8, 4)
        self.sides.bias.set_value(paddle.full([4], 5.1))

    def forward(self, images):
        return nn.functional.relu(self.sides(self.backbone(images))) * 32 * SIZE


def overlap_loss(sides, targets):
    left, top, right, bottom = sides.unbind(1)
    area = (left + right) * (top + bottom)
    wanted = (targets[:, 0] + targets[:, 2]) * (targets[:, 1] + targets[:, 3])
    least = paddle.minimum(sides, targets)
    shared = (least[:, 0] + least[:, 2]) * (least[:, 1] + least[:, 3])
    return (1 - shared / (area + wanted - shared)).mean()


paddle.seed(0)
model = Detector()
optimizer = paddle.optimizer.AdamW(3e-2, parameters=model.parameters())
images, targets = paddle.randn([8, 1, 16, 16]), paddle.uniform([8, 4], min=70.0, max=110.0) * SIZE
losses = []
for _ in range(14):
    sides = model(images)
    if "--cure" in sys.argv:
        sides = sides.astype("float32")
    loss = overlap_loss(sides, targets)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
