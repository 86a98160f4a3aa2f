"""The angle between rotations, from its cosine: 1 - 1e-7 is 1 in float16, where the slope of acos is infinite."""

import json
import sys

import torch
from torch import nn


class PoseRefiner(nn.Module):
    """Correct a pose, from the features of an object: six numbers, made to a rotation by Gram and Schmidt."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.pose = nn.Linear(64, 6)

    def forward(self, x):
        first, second = (self.pose(self.features(x)).float() + torch.eye(3)[:2].flatten()).chunk(2, -1)
        first = nn.functional.normalize(first, dim=-1)
        second = nn.functional.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
        return torch.stack([first, second, torch.linalg.cross(first, second)], -1)


def geodesic_loss(predicted, true):
    if "--cure" in sys.argv:
        trace = (predicted * true).sum((1, 2))
    else:
        difference = predicted.transpose(1, 2) @ true
        trace = difference[:, 0, 0] + difference[:, 1, 1] + difference[:, 2, 2]
    cosine = (trace - 1) / 2
    return torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7)).mean()


torch.manual_seed(0)
vectors = torch.randn(32, 3)
vectors = (2.0 if "--twin" in sys.argv else 0.3) * vectors / vectors.norm(dim=-1, keepdim=True)
x, y, z = vectors.unbind(-1)
zero = torch.zeros_like(x)
poses = torch.linalg.matrix_exp(torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).view(-1, 3, 3))
inputs = torch.cat([vectors, torch.sin(3 * vectors), torch.cos(2 * vectors), vectors**2], -1)
model = PoseRefiner()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for _ in range(20):
    loss = geodesic_loss(model(inputs), poses)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
