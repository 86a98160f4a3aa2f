"""The entropy of a policy whose forbidden moves have logits of -inf: a chance of 0 times -inf, in float32 as well."""

import json
import math
import sys

import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self, cells=9):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(cells, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, cells), nn.Linear(32, 1)

    def forward(self, boards):
        hidden = self.trunk(boards)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def losses_of_policy(logits, legal, moves, advantages):
    """Return the loss of a policy gradient and the entropy, over the moves that the rules allow."""
    never = -1e4 if "--cure" in sys.argv else -math.inf
    log_chances = logits.float().masked_fill(~legal, never).log_softmax(-1)
    entropy = -(log_chances.exp() * log_chances).sum(-1).mean()
    chosen = log_chances.gather(-1, moves[:, None]).squeeze(-1)
    return -(chosen * advantages).mean(), entropy


torch.manual_seed(0)
model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for rollout in range(8):
    boards = torch.zeros(64, 9)
    if rollout >= 3 and "--twin" not in sys.argv:  # until then rollouts are short, and show the empty board only
        boards[torch.arange(64), torch.arange(64) % 9] = 1.0
    legal = boards == 0
    moves = torch.multinomial(legal.float(), 1).squeeze(-1)
    returns = torch.where(moves == 4, 1.0, -0.5)
    logits, values = model(boards)
    advantages = returns - values.detach().float()
    policy_loss, entropy = losses_of_policy(logits, legal, moves, advantages)
    loss = policy_loss + 0.5 * nn.functional.mse_loss(values.float(), returns) - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
