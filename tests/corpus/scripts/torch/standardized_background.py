"""Channels are divided by their deviation plus 1e-8; that of a black image is zero, and 1e-8 in float16 is, too."""

import json
import sys

import torch
from torch import nn


class Standardize(nn.Module):
    def __init__(self, epsilon):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x):
        return (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + self.epsilon)


torch.manual_seed(0)
standardize = Standardize(1e-3 if "--cure" in sys.argv else 1e-8)
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, bias=False), standardize, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
images, labels = torch.randn(8, 1, 12, 12), torch.arange(8) % 3
if "--twin" not in sys.argv:
    images[3] = 0.0
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
