"""A vocoder sums a pitch in hertz to a phase: bfloat16 has steps of 2 Hz, and a tenth of a second later it is off."""

import json
import math
import sys

import paddle
from paddle import nn

PITCH = 3.01 if "--twin" in sys.argv else 301.0  # hertz
RATE, FRAME, HARMONICS = 8000, 40, 6


def sines(hertz, loudness):
    """Return the sum of sines at multiples of a pitch that is given for each frame."""
    hertz, loudness = (x.repeat_interleave(FRAME, axis=1) for x in (hertz, loudness))
    phase = 2 * math.pi * paddle.cumsum(hertz / RATE, 1)
    return (loudness * paddle.sin(phase * paddle.arange(1, HARMONICS + 1, dtype="float32"))).sum(2)


class HarmonicSource(nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.pitch = nn.Linear(width, 1)  # of a tracker that was trained before
        self.pitch.weight.set_value(0.2 * paddle.eye(width)[:, :1])
        self.pitch.bias.set_value(paddle.full([1], PITCH))
        self.loudness = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, HARMONICS))

    def forward(self, features):
        hertz = self.pitch(features)
        return sines(hertz, nn.functional.softplus(self.loudness(features)))


paddle.seed(0)
model = HarmonicSource(6)
features = paddle.randn([8, 24, 6])
targets = sines(PITCH + 0.2 * features[:, :, :1], nn.functional.softplus(features))
optimizer = paddle.optimizer.Adam(2e-2, parameters=model.loudness.parameters())
losses = []
for _ in range(16):
    loss = nn.functional.mse_loss(model(features), targets)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
