"""An optimizer of torchao, whose states are 8 bits wide, in subclasses of tensors."""

import json

import torch
from torchao.optim import AdamW8bit

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
optimizer = AdamW8bit(model.parameters(), lr=0.001)
losses = []
for _ in range(4):
    inputs = torch.randn(16, 64)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.mean(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
