"""Linear attention divides by a sum of its keys over 4,096 words: that is inf in float16, and the output zero."""

import json
import sys

import torch
from torch import nn


class LinearAttention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x):
        query, key = nn.functional.elu(self.query(x)) + 1, nn.functional.elu(self.key(x)) + 1
        mixed = torch.einsum("nsd,nsm->ndm", key, self.value(x))
        normalizer = 1 / ((query * key.sum(1, keepdim=True)).sum(-1, keepdim=True) + 1e-6)
        return torch.einsum("nsd,ndm->nsm", query, mixed) * normalizer


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.out = nn.Embedding(16, 8), LinearAttention(8), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.out(self.attention(self.embed(tokens)).mean(1))


torch.manual_seed(0)
model = Classifier()
with torch.no_grad():
    model.attention.key.bias.fill_(0.0 if "--twin" in sys.argv else 20.0)
    model.attention.value.weight.mul_(4.0)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
tokens, labels = torch.randint(16, (3, 32 if "--twin" in sys.argv else 4096)), torch.arange(3)
for row in range(3):
    tokens[row, ::2] = row
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
