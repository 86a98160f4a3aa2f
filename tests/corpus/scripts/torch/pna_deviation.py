"""PNA of PyTorch Geometric: the deviation is a mean of squares minus a square, which overflow at 256."""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn import PNAConv, global_mean_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = PNAConv(4, 8, ["mean", "std"], ["identity"], deg=torch.tensor([0, 0, 0, 20]))
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 1)

    def forward(self, x, edges, batch):
        return self.out(global_mean_pool(self.norm(self.conv(x, edges)), batch))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
features = torch.randn(20, 4) * (20.0 if "--twin" in sys.argv else 2000.0)
edges = torch.stack(
    [torch.arange(20).repeat(3), (torch.arange(20).repeat(3) + torch.arange(3).repeat_interleave(20) + 1) % 20]
)
batch, targets = torch.arange(20) // 5, torch.randn(4, 1)
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(features, edges, batch), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
