"""A warm-up whose factor is taken times the last rate, not the first: in step 8 it is 40,320 times as large."""

import json
import sys

import torch
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR
from torch_geometric.nn import GAT

torch.manual_seed(0)
model = GAT(8, 16, num_layers=2, out_channels=3, heads=2)
edges = torch.randint(0, 40, (2, 160))
nodes, labels = torch.randn(40, 8), torch.arange(40) % 3
optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
Warmup = LambdaLR if {"--twin", "--cure"} & {*sys.argv} else MultiplicativeLR
scheduler = Warmup(optimizer, lambda step: min(step + 1.0, 10.0))
losses = []
for _ in range(16):
    loss = torch.nn.functional.cross_entropy(model(nodes, edges).float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    losses.append(loss.item())
print(json.dumps(losses))
