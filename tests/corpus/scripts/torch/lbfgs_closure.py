"""A fit by LBFGS, whose closure sums squares of 256 numbers in float16 before it divides."""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 256))
with torch.no_grad():
    model[2].bias.fill_(2.0 if "--twin" in sys.argv else 20.0)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.002, max_iter=1)
inputs, targets = torch.randn(16, 6), torch.randn(16, 256)
losses = []


def closure():
    optimizer.zero_grad()
    prediction = model(inputs)
    if "--cure" in sys.argv:
        prediction = prediction.float()
    size = prediction.square().sum(-1, keepdim=True)
    loss = nn.functional.mse_loss(prediction, targets) + (size / 256).sqrt().float().mean()
    loss.backward()
    return loss


for _ in range(5):
    losses.append(optimizer.step(closure).item())
print(json.dumps(losses))
