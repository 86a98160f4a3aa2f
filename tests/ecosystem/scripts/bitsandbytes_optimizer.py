"""An optimizer of bitsandbytes, whose states are 8 bits wide."""

import json

import bitsandbytes
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.001)
losses = []
for _ in range(4):
    inputs = torch.randn(16, 64)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.mean(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
