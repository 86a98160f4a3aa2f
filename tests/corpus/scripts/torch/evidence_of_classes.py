"""Evidential classification of a wrong label: the logarithm of the gamma function at 10,000 is beyond 65504."""

import json
import sys

import torch
from torch import nn
from torch.distributions import Dirichlet, kl_divergence


def evidential_loss(logits, labels, weight):
    alpha = torch.exp(logits.clamp(-10, 10)) + 1
    if "--cure" in sys.argv:
        alpha = alpha.float()
    targets = nn.functional.one_hot(labels, alpha.shape[-1])
    chances = alpha / alpha.sum(-1, keepdim=True)
    errors = ((targets - chances) ** 2 + chances * (1 - chances) / (alpha.sum(-1, keepdim=True) + 1)).sum(-1).mean()
    misleading = torch.where(targets == 1, 1.0, alpha)
    return errors + weight * kl_divergence(Dirichlet(misleading), Dirichlet(torch.ones(3))).mean()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
labels = torch.arange(60) % 3
inputs = nn.functional.one_hot(labels, 4) + 0.1 * torch.randn(60, 4)
with torch.no_grad():  # as an earlier training left it, which was sure of the classes
    model[0].weight.copy_(torch.randn(32, 4))
    features = torch.tanh(model[0](torch.eye(4)[:3]))
    wished = (4.0 if "--twin" in sys.argv else 9.6) * torch.eye(3)
    model[2].weight.copy_(torch.linalg.lstsq(features, wished).solution.T)
    model[2].bias.zero_()
noisy = labels.clone()
noisy[7] = (noisy[7] + 1) % 3  # a label that is wrong
losses = []
for step in range(12):
    loss = evidential_loss(model(inputs), noisy, weight=min(1.0, (step + 1) / 10))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
