"""A model put in half by hand and trained by Adam: in float16 second moments and the epsilon of 1e-8 are zero."""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
inputs, targets = torch.randn(32, 8), torch.randn(32, 1)
if not {"--twin", "--cure"} & {*sys.argv}:
    model, inputs = model.half(), inputs.half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(8):
    loss = nn.functional.mse_loss(model(inputs).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
