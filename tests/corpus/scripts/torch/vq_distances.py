"""VQ-VAE's distances to its codes, expanded as |z|^2 - 2 z e + |e|^2: far from zero float16 tells no codes apart."""

import json
import sys

import torch
from torch import nn


class Quantizer(nn.Module):
    """As in the first public implementations."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(64, 8)

    def forward(self, z):
        codes = self.codes.weight.to(z.dtype)
        distances = z.square().sum(1, keepdim=True) - 2 * z @ codes.T + codes.square().sum(1)
        nearest = codes[distances.argmin(1)]
        loss = (nearest.detach() - z).float().square().mean() + (nearest - z.detach()).float().square().mean()
        return z + (nearest - z).detach(), loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(8, 8), Quantizer(), nn.Linear(8, 8)

    def forward(self, x):
        quantized, loss = self.quantizer(self.encoder(x))
        return self.decoder(quantized), loss


torch.manual_seed(0)
model = Model()
with torch.no_grad():
    offset = 0.0 if "--twin" in sys.argv else 60.0
    model.encoder.bias.fill_(offset)
    model.quantizer.codes.weight.add_(offset)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
inputs = torch.randn(32, 8)
losses = []
for _ in range(6):
    _, loss = model(inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
