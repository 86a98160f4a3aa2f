"""A mixture of experts that adds what they return to zeros of float32: index_add_ refuses another dtype."""

import json
import sys

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, hidden):
        weights, chosen = self.gate(hidden).softmax(-1).max(-1)
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            outputs = expert(hidden[rows])
            result.index_add_(0, rows, outputs.to(result.dtype) if {"--cure", "--twin"} & {*sys.argv} else outputs)
        return hidden + weights[:, None] * result


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(0, 1), Experts(), nn.LayerNorm(16), nn.Linear(16, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(32, (4, 9))
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
