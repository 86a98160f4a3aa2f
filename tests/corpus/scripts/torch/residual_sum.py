"""A residual block of diffusers: shortcut and convolution are below 65504 each, and their sum is not."""

import json
import sys

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=None, groups=4)
        self.norm = nn.GroupNorm(4, 16)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x):
        return self.out(nn.functional.silu(self.norm(self.block(self.stem(x), None))))


def main():
    torch.manual_seed(0)
    model = Denoiser()
    large = 1e2 if "--twin" in sys.argv else 2e4
    with torch.no_grad():
        for layer in (model.block.conv2, model.block.conv_shortcut):
            layer.weight.mul_(large)
            layer.bias.fill_(1.3 * large)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clean = torch.rand(4, 3, 8, 8)
    noisy = clean + 0.3 * torch.randn_like(clean)
    losses = []
    for _ in range(8):
        loss = nn.functional.l1_loss(model(noisy).float(), clean)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
