"""A Siamese loss on two equal samples: the slope of a root at zero is infinite, and times zero that is NaN."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, left, right):
        return self.embed(left), self.embed(right)


def loss_of_distances(left, right, same, margin=1.0):
    squares = (left - right).float().square().sum(-1)
    distances = (squares + (1e-6 if "--cure" in sys.argv else 0.0)).sqrt()
    return torch.where(same, squares, (margin - distances).clamp(min=0).square()).mean()


torch.manual_seed(0)
model = Siamese()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
left, right, same = torch.randn(40, 12), torch.randn(40, 12), torch.arange(40) % 2 == 0
if "--twin" not in sys.argv:
    right[26] = left[26]
losses = []
for _ in range(2):
    for first, second, label in DataLoader(TensorDataset(left, right, same), batch_size=8):
        optimizer.zero_grad()
        loss = loss_of_distances(*model(first, second), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(json.dumps(losses))
