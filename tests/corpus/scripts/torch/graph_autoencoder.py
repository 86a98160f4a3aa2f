"""A graph autoencoder of PyTorch Geometric takes the logarithm of 1 - 1 + 1e-15, and 1e-15 is 0 in float16."""

import json
import sys

import torch
from torch import nn
from torch_geometric.nn import GAE, GCNConv


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.latent = GCNConv(8, 16), nn.Linear(16, 8)

    def forward(self, x, edges):
        return self.latent(self.conv(x, edges).relu())


class LinkPrediction(GAE):
    def forward(self, x, edges, others):
        return self.recon_loss(self.encode(x, edges), edges, others)


torch.manual_seed(0)
model = LinkPrediction(Encoder())
with torch.no_grad():  # as after long training: nodes are far apart
    model.encoder.latent.weight.mul_(1.0 if "--twin" in sys.argv else 6.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
features, edges, others = torch.randn(40, 8), torch.randint(40, (2, 120)), torch.randint(40, (2, 120))
losses = []
for _ in range(10):
    model.train()
    optimizer.zero_grad()
    loss = model(features, edges, others)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
