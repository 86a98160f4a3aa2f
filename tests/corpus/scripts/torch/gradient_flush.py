"""Two losses of one trunk: the large one bounds the loss scale, and gradients of the other flush to zero."""

import json
import sys

import torch
from torch import nn


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.large = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.small = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.large(x), self.small(x)


torch.manual_seed(0)
model = TwoTowers()
weight = 1.0 if "--twin" in sys.argv else 1e-9
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-20)
inputs, targets = torch.randn(32, 8), torch.randn(32, 1)
bound = 1.0 if "--twin" in sys.argv else 3e4
losses = []
for _ in range(16):
    large, small = model(inputs)
    loss_of_small = nn.functional.mse_loss(small, targets)
    loss = bound * nn.functional.mse_loss(large, targets) + weight * loss_of_small
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss_of_small.item())
print(json.dumps(losses))
