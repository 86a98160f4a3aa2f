"""WGAN-GP: the loss is scaled, but not the gradient that the penalty is of; it is 0 in float16, and so has no norm."""

import json
import sys
from itertools import pairwise

import torch
from torch import nn


def layers(kind, *sizes):
    """Return layers that halve or double an image, each followed by an activation, save the last."""
    pairs = pairwise(sizes)
    return nn.Sequential(*(m for a, b in pairs for m in (kind(a, b, 4, 2, 1), nn.LeakyReLU(0.2))))[:-1]


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = layers(nn.Conv2d, 3, 2, 2, 2, 2, 2, 1)

    def forward(self, images):
        return self.patches(images).mean((1, 2, 3))  # the mean over patches


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.upsample = layers(nn.ConvTranspose2d, 8, 8, 8, 3)

    def forward(self, noise):
        return torch.tanh(self.upsample(noise))


def gradient_penalty(critic, real, fake):
    mixing = torch.rand(len(real), 1, 1, 1)
    images = (mixing * real + (1 - mixing) * fake).requires_grad_()
    (slopes,) = torch.autograd.grad(critic(images).sum(), images, create_graph=True)
    return ((slopes.square().sum((1, 2, 3)).sqrt() - 1) ** 2).mean()


torch.manual_seed(0)
generator, critic = Generator(), Critic()
for layer in critic.patches[::2]:
    nn.init.normal_(layer.weight, 0.0, 0.2 if "--twin" in sys.argv else 0.02)  # 0.02 as in DCGAN
rate = 3e-4 if "--twin" in sys.argv else 2e-2
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=rate, betas=(0.5, 0.9))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=3e-4, betas=(0.5, 0.9))
real = torch.randn(4, 3, 64, 64).clamp(-1, 1)
losses = []
for _ in range(11):
    fake = generator(torch.randn(4, 8, 8, 8)).float()
    penalty = gradient_penalty(critic, real, fake.detach())
    loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
    loss.backward()
    critic_optimizer.step()
    critic_optimizer.zero_grad()
    (-critic(fake).mean()).backward()
    generator_optimizer.step()
    generator_optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
