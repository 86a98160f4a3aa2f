"""Points 400 m from the origin are rotated before they are shifted: bfloat16 has steps of 2 m there."""

import json
import sys

import paddle
from paddle import nn

DISTANCE = 0.0 if "--twin" in sys.argv else 400.0


class ToCar(nn.Layer):
    """From the map's coordinates to those of the car."""

    def __init__(self, position, angle):
        super().__init__()
        cos, sin = paddle.cos(angle), paddle.sin(angle)
        self.register_buffer("rotation", paddle.stack([paddle.stack([cos, -sin]), paddle.stack([sin, cos])]))
        self.register_buffer("shift", (position.unsqueeze(1) * self.rotation).sum(0))

    def forward(self, points):
        return paddle.matmul(points, self.rotation) - self.shift


class PointNet(nn.Layer):
    def __init__(self, to_car):
        super().__init__()
        self.to_car = to_car
        self.each = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16))
        self.out = nn.Linear(16, 1)

    def forward(self, points):
        return self.out(self.each(self.to_car(points)).max(1))


paddle.seed(0)
position = paddle.to_tensor([DISTANCE, 0.6 * DISTANCE])
local = paddle.uniform([16, 24, 2], min=-1.5, max=1.5)
targets = local.max(1)[:, :1] - local.min(1)[:, 1:]
model = PointNet(ToCar(position, paddle.to_tensor(0.3)))
points = paddle.matmul(local, model.to_car.rotation, transpose_y=True) + position
optimizer = paddle.optimizer.Adam(1e-2, parameters=model.parameters())
losses = []
for _ in range(15):
    loss = nn.functional.smooth_l1_loss(model(points), targets)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
