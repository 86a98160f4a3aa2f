"""Soft actor-critic: log(1 - tanh(x)^2 + 1e-6) of an action near its bound, where float16 has no digits left."""

import json
import sys

import torch
from torch import nn


class SquashedGaussian(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.mean, self.log_std = nn.Linear(32, size), nn.Linear(32, size)

    def forward(self, hidden, noise):
        mean, std = self.mean(hidden), self.log_std(hidden).clamp(-5, 2).exp()
        raw = mean + std * noise.to(mean.dtype)
        action = torch.tanh(raw)
        log_prob = -0.5 * ((raw - mean) / std) ** 2 - std.log() - 0.919
        return action, (log_prob - torch.log(1 - action.pow(2) + 1e-6)).sum(-1)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.policy = SquashedGaussian(3)

    def forward(self, states, noise):
        return self.policy(self.trunk(states), noise)


torch.manual_seed(0)
actor, critic = Actor(), nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))
with torch.no_grad():
    actor.policy.mean.bias.fill_(0.0 if "--twin" in sys.argv else 4.5)
    actor.policy.log_std.bias.fill_(-1.0)
log_alpha = torch.zeros((), requires_grad=True)
of_actor, of_alpha = torch.optim.Adam(actor.parameters(), lr=3e-3), torch.optim.Adam([log_alpha], lr=1e-2)
states, noise = torch.randn(64, 6), torch.randn(64, 3)
losses = []
for _ in range(12):
    actions, log_prob = actor(states, noise)
    value = critic(torch.cat([states.to(actions.dtype), actions], -1)).squeeze(-1)
    loss = (log_alpha.exp().detach() * log_prob.float() - value.float()).mean()
    of_actor.zero_grad()
    loss.backward()
    of_actor.step()
    losses.append(loss.item())
    loss_of_alpha = -(log_alpha * (log_prob.float().detach() - 3.0)).mean()
    of_alpha.zero_grad()
    loss_of_alpha.backward()
    of_alpha.step()
print(json.dumps(losses))
