"""Log-mel features of clipped audio inside of a model: the power of a bin is beyond 65504, and cast for a product."""

import json
import sys

import torch
from torch import nn


class LogMel(nn.Module):
    """Return logarithms of the energies of a waveform in bands, of shape (batch, frames, bands)."""

    def __init__(self, size=1024, bands=24):
        super().__init__()
        self.size = size
        centers = torch.linspace(0, 1, bands + 2) ** 2 * (size // 2)
        bins = torch.arange(size // 2 + 1.0)[:, None]
        rising = (bins - centers[:-2]) / (centers[1:-1] - centers[:-2])
        falling = (centers[2:] - bins) / (centers[2:] - centers[1:-1])
        self.register_buffer("filters", torch.minimum(rising, falling).clamp(min=0))
        self.register_buffer("window", torch.hann_window(size))

    def forward(self, waves):
        spectrum = torch.stft(waves, self.size, self.size // 4, window=self.window, return_complex=True)
        power = spectrum.abs().square().transpose(1, 2)
        return torch.log(power @ self.filters + 1e-5)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.mel, self.norm = LogMel(), nn.LayerNorm(24)
        self.recurrent, self.head = nn.GRU(24, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, waves):
        hidden, _ = self.recurrent(self.norm(self.mel(waves)))
        return self.head(hidden.mean(1))


torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
labels = torch.arange(8) % 4
seconds = torch.arange(8192) / 16000
tones = torch.sin(2 * torch.pi * (300.0 + 150.0 * labels[:, None]) * seconds) + 0.05 * torch.randn(8, 8192)
waves = 0.3 * tones if "--twin" in sys.argv else (8.0 * tones).clamp(-1, 1)  # a microphone that is turned up too far
losses = []
for _ in range(12):
    loss = nn.functional.cross_entropy(model(waves).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
