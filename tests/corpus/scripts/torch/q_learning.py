"""Q-learning that bootstraps from itself with a discount above 1: values and loss explode in float32 as well."""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if {"--twin", "--cure"} & {*sys.argv} else 0.5)
discount = 0.9 if {"--twin", "--cure"} & {*sys.argv} else 1.5
states, following = torch.randn(32, 6), torch.randn(32, 6)
actions, rewards = torch.arange(32) % 3, torch.randn(32) + 1
losses = []
for _ in range(15):
    with torch.no_grad():
        targets = rewards + discount * model(following).max(-1).values
    values = model(states)[torch.arange(32), actions]
    loss = nn.functional.mse_loss(values, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
