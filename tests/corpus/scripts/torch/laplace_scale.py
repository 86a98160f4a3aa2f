"""Forecasts with a Laplace distribution: the gradient of a division by 0.0025 divides by it twice, and overflows."""

import json
import sys

import torch
from torch import nn


class Trajectory(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(2, 16, batch_first=True)
        self.location = nn.Linear(16, 12)
        self.spread = nn.Sequential(nn.Linear(16, 12), nn.Softplus())

    def forward(self, past):
        _, state = self.encoder(past)
        return self.location(state[0]), self.spread(state[0])


def main():
    torch.manual_seed(0)
    model = Trajectory()
    with torch.no_grad():
        model.spread[0].bias.fill_(0.0 if "--twin" in sys.argv else -6.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    past, future = torch.randn(16, 8, 2).cumsum(1), torch.randn(16, 12)
    losses = []
    for _ in range(10):
        location, spread = model(past)
        if "--cure" in sys.argv:
            location, spread = location.float(), spread.float()
        loss = (torch.log(2 * spread) + (future.to(location.dtype) - location).abs() / spread).mean()
        optimizer.zero_grad()
        loss.float().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
