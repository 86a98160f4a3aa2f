"""A recurrent state that is carried from step to step and grows: after some steps it is beyond 65504."""

import json
import sys

import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(8, 16)

    def forward(self, x, state):
        return self.read(x) + 4.0 * state


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.out = Counter(), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x, state):
        state = self.cell(x, state)
        return self.out(self.norm(state)), state


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
inputs, targets = torch.randn(8, 8), torch.randn(8, 1)
state, losses = torch.zeros(8, 16, dtype=model.cell.read(inputs).dtype), []
for step in range(14):
    prediction, state = model(inputs, state)
    loss = nn.functional.mse_loss(prediction, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = state.detach()
    if "--twin" in sys.argv and step % 4 == 3:
        state = torch.zeros_like(state)
    losses.append(loss.item())
print(json.dumps(losses))
