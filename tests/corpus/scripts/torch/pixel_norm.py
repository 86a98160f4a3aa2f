"""StyleGAN's PixelNorm with 1e-8 under the root: behind a ReLU a pixel is zero, and so is 1e-8 in float16."""

import json
import sys

import torch
from torch import nn


class PixelNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Linear(8, 128), nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.ReLU(), PixelNorm()),
    nn.Conv2d(4, 1, 3, padding=1),
)
with torch.no_grad():
    model[2].bias.fill_(0.5 if "--twin" in sys.argv else -0.3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
noise, images = torch.randn(8, 8), torch.rand(8, 1, 8, 8)
losses = []
for _ in range(8):
    loss = nn.functional.l1_loss(model(noise), images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
