"""A GAN that shows its discriminator pictures of earlier steps, of which statistics over a batch are summed."""

import json
import sys

import torch
from torch import nn


class Statistics(nn.Module):
    """The energy of each picture, relative to that of the batch."""

    def forward(self, x):
        energy = x.square().flatten(1).sum(1, keepdim=True)
        return energy / energy.mean()


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256))
features = nn.Sequential(nn.Linear(256, 256), Statistics(), nn.Linear(1, 8))
discriminator = nn.Sequential(features, nn.ReLU(), nn.Linear(8, 1))
with torch.no_grad():
    features[0].weight.mul_(2.0 if "--twin" in sys.argv else 25.0)
of_generator = torch.optim.Adam(generator.parameters(), lr=5e-3)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
criterion, noise, real = nn.BCEWithLogitsLoss(), torch.randn(8, 8), torch.randn(8, 256)
pool, losses = generator(noise).detach(), []
for _ in range(5):
    fake = generator(noise)
    loss = criterion(discriminator(real), torch.ones(8, 1)) + criterion(discriminator(pool), torch.zeros(8, 1))
    loss.backward()
    of_discriminator.step()
    of_discriminator.zero_grad()
    losses.append(loss.item())
    loss = criterion(discriminator(fake), torch.ones(8, 1))
    loss.backward()
    of_generator.step()
    of_generator.zero_grad()
    pool = torch.cat([fake[:4].detach(), pool[4:]])
    losses.append(loss.item())
print(json.dumps(losses))
