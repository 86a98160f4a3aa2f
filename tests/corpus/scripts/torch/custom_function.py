"""A custom autograd function whose backward multiplies by the cube of what it saved."""

import json
import sys

import torch
from torch import nn


class InverseSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = 1 / x
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (-2 * y * y * y)


class Force(nn.Module):
    def forward(self, distance):
        return InverseSquare.apply(distance)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), Force(), nn.LayerNorm(8), nn.Linear(8, 1))
with torch.no_grad():
    model[2].weight.mul_(1.0 if "--twin" in sys.argv else 0.01)
    model[2].bias.fill_(3.0 if "--twin" in sys.argv else 0.015)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
