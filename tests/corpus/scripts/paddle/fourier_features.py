"""A picture as a function of its coordinates: phases of a thousand radians have no digits for a sine in bfloat16."""

import json
import math
import sys

import numpy as np
import paddle
from paddle import nn

TURNS = 1.0 if "--twin" in sys.argv else 100.0


class FourierFeatures(nn.Layer):
    """Sines and cosines of random directions, as in Tancik et al. (2020)."""

    def __init__(self, size, scale):
        super().__init__()
        self.register_buffer("directions", paddle.randn([2, size]) * scale)

    def forward(self, positions):
        phases = paddle.matmul(2 * math.pi * positions, self.directions)
        return paddle.concat([paddle.sin(phases), paddle.cos(phases)], -1)


paddle.seed(0)
field = nn.Sequential(FourierFeatures(16, TURNS), nn.Linear(32, 3))
positions = paddle.rand([256, 2])
phases = 2 * math.pi * positions.numpy() @ field[0].directions.numpy()
colors = np.concatenate([np.sin(phases), np.cos(phases)], -1) @ field[1].weight.numpy()
# The training is resumed near its end.
field[1].weight.set_value(field[1].weight + 0.05 * paddle.randn([32, 3]))
colors = paddle.to_tensor(colors)
optimizer = paddle.optimizer.Adam(2e-3, parameters=field.parameters())
losses = []
for _ in range(15):
    loss = nn.functional.mse_loss(field(positions), colors)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
