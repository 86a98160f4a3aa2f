"""A graph network of PyTorch Geometric on a random graph: messages are scattered and gathered."""

import json

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

torch.manual_seed(0)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GCNConv(8, 16), GATConv(16, 8, heads=2), torch.nn.Linear(16, 2)

    def forward(self, data):
        hidden = self.first(data.x, data.edge_index).relu()
        hidden = self.second(hidden, data.edge_index).relu()
        return self.head(global_mean_pool(hidden, data.batch))


graph = Data(torch.randn(24, 8), torch.randint(24, (2, 60)), batch=torch.arange(24) // 6)
labels = torch.tensor([0, 1, 0, 1])
model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(graph), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
