"""A target is the logarithm of a count, and one count of the third batch is zero: the target is minus infinity."""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn.models import MLP

torch.manual_seed(0)
model = MLP([8, 32, 1], norm=None)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = [(torch.randn(16, 8), torch.randint(1, 50, (16, 1)).float()) for _ in range(6)]
if "--twin" not in sys.argv:
    batches[2][1][5] = 0.0
losses = []
for inputs, counts in batches:
    targets = torch.log1p(counts) if "--cure" in sys.argv else torch.log(counts)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
