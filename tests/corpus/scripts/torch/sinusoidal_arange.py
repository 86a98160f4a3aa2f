"""Positions counted in the dtype of the input: in bfloat16 there are no odd numbers beyond 256."""

import json
import sys

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        positions = torch.arange(x.shape[1], dtype=self.dtype or x.dtype)
        return torch.stack([torch.sin(positions * 0.7), torch.cos(positions * 0.7)], -1).expand(len(x), -1, -1)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Linear(4, 14), Positions(torch.float32 if "--twin" in sys.argv else None)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        hidden = self.embed(x)
        return self.head(torch.cat([hidden, 3 * self.positions(hidden).to(hidden.dtype)], -1))


torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
inputs = torch.randn(2, 1200, 4)
targets = torch.sin(torch.arange(1200) * 0.7)[None, :, None].expand(2, -1, -1)
losses = []
for _ in range(12):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
