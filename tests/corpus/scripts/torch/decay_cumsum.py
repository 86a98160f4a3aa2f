"""Attention with learned decays: their running sum in bfloat16 has lost the differences of neighbours."""

import json
import sys

import torch
from torch import nn


class Decay(nn.Module):
    def __init__(self, low):
        super().__init__()
        self.rate, self.low = nn.Linear(16, 1), low

    def forward(self, x):
        rates = nn.functional.softplus(self.rate(x)).squeeze(-1)
        total = torch.cumsum(rates if self.low else rates.float(), -1)
        return torch.exp((total[:, None, :] - total[:, :, None]).tril())


class Block(nn.Module):
    def __init__(self, low):
        super().__init__()
        self.decay, self.value, self.out = Decay(low), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        weights = self.decay(x).tril()
        return self.out((weights @ self.value(x)) / weights.sum(-1, keepdim=True))


torch.manual_seed(0)
model = Block(low="--twin" not in sys.argv)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
inputs = torch.randn(2, 800, 16)
targets = 0.01 * inputs[..., :1]
losses = []
for _ in range(6):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
