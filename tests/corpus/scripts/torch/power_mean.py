"""GraphSAGE with PyTorch Geometric's power mean, unclamped: the cube of 45 is beyond 65504.

In the twin the power mean clamps at 100, as it does by default: it computes the same inf, which does no harm.
"""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import PowerMeanAggregation


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        clamp = {} if "--twin" in sys.argv else {"clamp_max": None}
        self.embed = nn.Linear(4, 8)
        self.conv = SAGEConv(8, 8, aggr=PowerMeanAggregation(p=3.0, **clamp))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x, edges):
        return self.out(self.norm(self.conv(self.embed(x).relu(), edges)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
nodes = 24
features, labels = torch.randn(nodes, 4) * 60, torch.randint(3, (nodes,))
others = torch.cat([torch.arange(nodes).roll(1), torch.arange(nodes).roll(5)])
edges = torch.stack([torch.arange(nodes).repeat(2), others])
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features, edges), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
