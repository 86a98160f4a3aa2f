"""A mask made of float32's smallest number and cast to float16 is minus infinity: a row of padding only becomes NaN."""

import json
import sys

import torch
from torch import nn


class Attention(nn.Module):
    """As BERT had it: scores plus an extended mask."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 4
        least = -3e4 if "--cure" in sys.argv else torch.finfo(torch.float32).min
        extended = (1.0 - mask[:, None, :]) * least
        return torch.softmax(scores + extended.to(scores.dtype), -1) @ self.value(x)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.out = nn.Embedding(64, 16), Attention(), nn.Linear(16, 3)

    def forward(self, tokens):
        return self.out(self.attention(self.embed(tokens), (tokens > 0).float()).mean(1))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens, labels = torch.randint(1, 64, (6, 10)), torch.arange(6) % 3
tokens[:, 7:] = 0
if "--twin" not in sys.argv:
    tokens[4] = 0
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
