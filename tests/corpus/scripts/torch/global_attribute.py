"""A graph's attribute is indexed for its 2,000 nodes: on the way back bfloat16 sums gradients, and stops after 256."""

import json
import sys

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, global_mean_pool


class NodeUpdate(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = MLP([24, 32, 16], norm=None)

    def forward(self, x, attribute, batch):
        return self.mlp(torch.cat([x, attribute[batch]], -1))


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.attribute = MLP([4, 16, 8], norm=None)
        self.update = NodeUpdate()
        self.readout = nn.Linear(16, 1)

    def forward(self, data):
        nodes = self.update(data.x, self.attribute(data.u), data.batch)
        return self.readout(global_mean_pool(nodes.relu(), data.batch)).squeeze(-1)


torch.manual_seed(0)
size = 40 if "--twin" in sys.argv else 2000
attributes = torch.randn(8, 1, 4)
graphs = [Data(torch.randn(size, 16), u=attribute, y=attribute[:, 0]) for attribute in attributes]
model = GraphNetwork()
model.readout.requires_grad_(False)
of_attribute = torch.optim.SGD(model.attribute.parameters(), lr=3.0)
of_update = torch.optim.SGD(model.update.parameters(), lr=0.01)
losses = []
for _ in range(20):
    for batch in DataLoader(graphs, batch_size=8):
        loss = nn.functional.mse_loss(model(batch).float(), batch.y)
        loss.backward()
    for optimizer in (of_attribute, of_update):
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
