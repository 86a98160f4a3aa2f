"""ListMLE of results that are scored far apart: the sum of a list's tail is 0 in float16, and so is 1e-10 beside it."""

import json
import sys

import torch
from torch import nn


def list_mle(scores, relevance):
    """Return the negative logarithm of the chance that scores put on the order of the relevance."""
    order = relevance.argsort(-1, descending=True)
    scores = scores.gather(-1, order)
    scores = scores - scores.amax(-1, keepdim=True)
    tails = scores.exp().flip(-1).cumsum(-1).flip(-1)
    return (torch.log(tails + 1e-10) - scores).sum(-1).mean()


class Ranker(nn.Module):
    def __init__(self, features=12):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.score = nn.Linear(32, 1)

    def forward(self, results):
        return self.score(self.hidden(results)).squeeze(-1)


torch.manual_seed(0)
model = Ranker()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
results = (1.0 if "--twin" in sys.argv else 120.0) * torch.randn(16, 10, 12)  # counts of clicks and words as they are
relevance = results[..., :3].sum(-1)
losses = []
for _ in range(10):
    scores = model(results)
    loss = list_mle(scores.float() if "--cure" in sys.argv else scores, relevance)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
