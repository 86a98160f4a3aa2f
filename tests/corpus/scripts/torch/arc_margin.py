"""ArcFace's margin takes the sine as a root: a cosine of 0.9999 is 1 in float16, and the root has no slope at 0."""

import json
import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ArcMargin(nn.Module):
    """As in the first public implementations of ArcFace for PyTorch."""

    def __init__(self, size, classes, scale=4.0, margin=0.3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, size))
        self.scale, self.margin = scale, margin

    def forward(self, features, labels):
        cosine = nn.functional.linear(nn.functional.normalize(features), nn.functional.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(0, 1))
        shifted = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        target = nn.functional.one_hot(labels, len(self.weight)).bool()
        return self.scale * torch.where(target, shifted, cosine)


class Faces(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.PReLU(), nn.Linear(64, 16))
        self.margin = ArcMargin(16, 4)

    def forward(self, images, labels):
        return self.margin(self.backbone(images), labels)


torch.manual_seed(0)
model = Faces()
people, labels = torch.randn(4, 32), torch.arange(48) % 4
images = people[labels] + (0.5 if "--twin" in sys.argv else 0.01) * torch.randn(48, 32)
with torch.no_grad():  # as late in training: pictures are near the center of their class
    model.margin.weight.copy_(model.backbone(people))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
losses = []
for _ in range(4):
    for batch, names in DataLoader(TensorDataset(images, labels), batch_size=16):
        loss = nn.functional.cross_entropy(model(batch, names).float(), names)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(json.dumps(losses))
