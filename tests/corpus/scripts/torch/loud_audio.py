"""SI-SDR of torchmetrics as a loss: the energy of loud audio is infinite in float16, and all of it counts as noise."""

import json
import sys

import torch
from torch import nn
from torchmetrics.functional.audio import scale_invariant_signal_distortion_ratio


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv1d(1, 16, 16, stride=8)
        self.mask = nn.Sequential(nn.Conv1d(16, 16, 1), nn.PReLU(), nn.Conv1d(16, 16, 1), nn.Sigmoid())
        self.decode = nn.ConvTranspose1d(16, 1, 16, stride=8)

    def forward(self, mixture):
        frames = self.encode(mixture)
        return self.decode(frames * self.mask(frames)).squeeze(1)


def train(loudness, steps=10):
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    phases = torch.rand(3, 1) + torch.arange(8000) * torch.tensor([[0.02], [0.05], [0.11]])
    clean = loudness * torch.sin(phases)
    mixture = clean + 0.3 * loudness * torch.randn_like(clean)
    losses = []
    for _ in range(steps):
        estimate = model(mixture[:, None])
        if "--cure" in sys.argv:
            estimate = estimate.float()
        target = clean.to(estimate.dtype)
        loss = -scale_invariant_signal_distortion_ratio(estimate, target).mean()
        optimizer.zero_grad()
        loss.float().backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
print(json.dumps(train(0.5 if "--twin" in sys.argv else 5.0)))
