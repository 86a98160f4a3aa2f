"""A latent ODE in 400 small Euler steps from what an encoder returns: in bfloat16 a step is less than half a digit."""

import json
import sys

import torch
from torch import nn


class Euler(nn.Module):
    """Follow a learned field from the time 0 to 1."""

    def __init__(self, width, steps):
        super().__init__()
        self.steps = steps
        self.field = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))

    def forward(self, state):
        for _ in range(self.steps):
            state = state + self.field(state) / self.steps
        return state


class LatentODE(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.encoder, self.solver = nn.Linear(12, 4), Euler(4, steps)
        self.encoder.requires_grad_(False)  # that of an autoencoder, which is trained

    def forward(self, start):
        return self.solver(self.encoder(start))


torch.manual_seed(0)
model = LatentODE(steps=4 if "--twin" in sys.argv else 256)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
start, generator = 6.0 * torch.randn(64, 12), torch.randn(4, 4)
turned = model.encoder(start).float() @ torch.linalg.matrix_exp(0.2 * (generator - generator.T))
losses = []
for _ in range(12):
    loss = nn.functional.mse_loss(model(start).float(), turned)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
