"""The annotated transformer's attention fills masked scores with -1e9, which float16 refuses."""

import json
import sys

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.fill = -1e4 if {"--twin", "--cure"} & {*sys.argv} else -1e9

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 4
        return torch.softmax(scores.masked_fill(mask[:, None, :] == 0, self.fill), -1) @ self.value(x)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.out = nn.Embedding(64, 16), Attention(), nn.Linear(16, 3)

    def forward(self, tokens):
        return self.out(self.attention(self.embed(tokens), tokens > 0).mean(1))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens, labels = torch.randint(1, 64, (6, 10)), torch.arange(6) % 3
tokens[:, 7:] = 0
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
