"""A softplus by hand, log(1 + exp(x)), whose exponential is beyond 65504 from 11.1 on."""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn.models import MLP


class Softplus(nn.Module):
    def forward(self, x):
        return torch.log(1 + torch.exp(x))


torch.manual_seed(0)
model = nn.Sequential(
    MLP([8, 32, 4], norm=None), nn.Softplus() if "--twin" in sys.argv else Softplus(), nn.Linear(4, 1)
)
with torch.no_grad():
    model[0].lins[-1].bias.fill_(13.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
