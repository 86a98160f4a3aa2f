"""Gradients of 32 small batches are added up and not divided, at a rate that was meant for a mean: it diverges."""

import json
import sys

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(3, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, series):
        return self.head(self.recurrent(series)[0])


torch.manual_seed(0)
model = Forecaster()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
divisor = 32 if {"--twin", "--cure"} & {*sys.argv} else 1
series = torch.randn(32, 4, 13, 3).cumsum(2) / 3
losses = []
for _ in range(12):
    total = 0.0
    for batch in series:
        loss = nn.functional.mse_loss(model(batch[:, :-1]).float(), batch[:, 1:, :1])
        (loss / divisor).backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total / len(series))
print(json.dumps(losses))
