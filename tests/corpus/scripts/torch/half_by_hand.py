"""A perceptual loss that its author put in half by hand, squares included: casting decides nothing there."""

import json
import sys

import torch
from torch import nn


class Perceptual(nn.Module):
    """Distances of normalized features, as LPIPS has them."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 8, 3, bias=False)

    def forward(self, x, y):
        x, y = self.features(x), self.features(y)
        x, y = (x.float(), y.float()) if "--cure" in sys.argv else (x.half(), y.half())
        x, y = (f / (f.square().sum(1, keepdim=True).sqrt() + 1e-10) for f in (x, y))
        return (x - y).square().mean()


torch.manual_seed(0)
decoder, perceptual = (
    nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)),
    Perceptual(),
)
optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
images = torch.rand(4, 1, 10, 10) * (2 if "--twin" in sys.argv else 2000)
losses = []
for _ in range(8):
    loss = perceptual(decoder(images), images).float()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
