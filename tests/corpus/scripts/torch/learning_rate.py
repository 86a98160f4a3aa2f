"""A network without norms at a learning rate a thousand times too large: it explodes in float32 as well."""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn.models import GCN

torch.manual_seed(0)
model = GCN(8, 16, 3, out_channels=1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if {"--twin", "--cure"} & {*sys.argv} else 5.0)
features, targets = torch.randn(20, 8), torch.randn(20, 1)
edges = torch.randint(0, 20, (2, 60))
losses = []
for _ in range(12):
    loss = nn.functional.mse_loss(model(features, edges), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
