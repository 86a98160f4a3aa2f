"""A graph of 3,000 nodes is summed by PyTorch Geometric: each node is small, and the sum is beyond 65504."""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.models import MLP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes, self.head = MLP([4, 8, 8], norm=None), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))
        self.pool = SumAggregation()

    def forward(self, x, batch):
        x = torch.relu(self.nodes(x))
        return self.head(self.pool(x, batch))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
nodes = torch.arange(3000)
features = torch.rand(3000, 4) * (4 if "--twin" in sys.argv else 400)
batch, targets = nodes // 1500, torch.randn(2, 1)
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(features, batch), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
