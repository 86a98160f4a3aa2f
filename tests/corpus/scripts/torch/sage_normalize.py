"""GraphSAGE normalizes rows; that of an isolated node without features is zero, and so is an epsilon of 1e-12."""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn import SAGEConv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = SAGEConv(8, 16, normalize=True, bias=False)
        self.second = SAGEConv(16, 3)

    def forward(self, x, edges):
        return self.second(torch.relu(self.first(x, edges)), edges)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
features, labels = torch.randn(20, 8), torch.arange(20) % 3
edges = torch.randint(0, 19, (2, 60))
if "--twin" not in sys.argv:
    features[19] = 0.0
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(features, edges), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
