"""The scale of a forecast's distribution by transformers' squareplus, which squares numbers beyond 256."""

import json
import sys

import torch
from torch import nn
from transformers.time_series_utils import NormalOutput


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32))
        self.output = NormalOutput()
        self.projection = self.output.get_parameter_projection(32)

    def forward(self, past):
        return self.output.distribution(self.projection(self.encoder(past)))


torch.manual_seed(0)
model = Forecaster()
with torch.no_grad():
    model.projection.proj[1].bias.fill_(100.0 if "--twin" in sys.argv else 400.0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
past, future = torch.randn(16, 8), torch.randn(16) * 100
losses = []
for _ in range(8):
    loss = -model(past).log_prob(future).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
