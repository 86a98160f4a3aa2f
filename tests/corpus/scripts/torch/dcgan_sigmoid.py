"""A discriminator that ends with a sigmoid, and BCELoss: in float16 a sure 1 is exactly 1, and its loss is 100."""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
twin = "--twin" in sys.argv
layers = [
    nn.Conv2d(1, 8, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(8, 16, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 1, 4),
]
discriminator = nn.Sequential(*layers) if twin else nn.Sequential(*layers, nn.Sigmoid())
with torch.no_grad():
    discriminator[4].bias.fill_(12.0)
criterion = nn.BCEWithLogitsLoss() if twin else nn.BCELoss()
optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
real, fake = torch.randn(8, 1, 16, 16), torch.randn(8, 1, 16, 16) * 0.1
losses = []
for _ in range(8):
    loss = criterion(discriminator(real).flatten(), torch.ones(8)) + criterion(
        discriminator(fake).flatten(), torch.zeros(8)
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
