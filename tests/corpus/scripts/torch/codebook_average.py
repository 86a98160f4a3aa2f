"""A codebook that follows a moving average of what is encoded: lerp refuses sums that are not float32, as it is."""

import json
import sys

import torch
from torch import nn


class Codebook(nn.Module):
    """Quantize vectors; codes are moving averages of the vectors that they stand for."""

    def __init__(self, codes, width, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", 0.5 * torch.randn(codes, width))

    def forward(self, vectors):
        codes = self.sums / self.counts[:, None].clamp(min=1e-3)
        nearest = torch.cdist(vectors.float(), codes).argmin(-1)
        if self.training:
            self.follow(vectors.detach(), nn.functional.one_hot(nearest, len(codes)).float())
        quantized = codes[nearest]
        commitment = nn.functional.mse_loss(vectors.float(), quantized)
        return vectors + (quantized - vectors).detach(), commitment

    def follow(self, vectors, chosen):
        self.counts.lerp_(chosen.sum(0), 1 - self.decay)
        sums = chosen.T @ vectors
        self.sums.lerp_(sums.float() if {"--cure", "--twin"} & {*sys.argv} else sums, 1 - self.decay)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.codebook = Codebook(8, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, inputs):
        quantized, commitment = self.codebook(self.encoder(inputs))
        return self.decoder(quantized), commitment


torch.manual_seed(0)
model = Autoencoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
inputs = torch.randn(8, 8)[torch.arange(256) % 8] + 0.1 * torch.randn(256, 8)
losses = []
for _ in range(15):
    outputs, commitment = model(inputs)
    loss = nn.functional.mse_loss(outputs.float(), inputs) + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
