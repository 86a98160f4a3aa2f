"""An RMSNorm by hand, which multiplies x by x in float16: 300 times 300 is beyond 65504."""

import json
import sys

import paddle
from paddle import nn


class RMSNorm(nn.Layer):
    def forward(self, x):
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


paddle.seed(0)
model = nn.Sequential(nn.Linear(8, 16), RMSNorm(), nn.Linear(16, 1))
optimizer = paddle.optimizer.Adam(1e-2, parameters=model.parameters())
inputs = paddle.randn([16, 8]) * (10.0 if "--twin" in sys.argv else 1000.0)
targets = paddle.sign(inputs[:, :1])
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
