"""ENet's weights of classes from pixels counted so far: after a few steps the count in float16 is infinite."""

import json
import sys

import torch
from torch import nn


class Frequencies(nn.Module):
    """Weights of classes, larger for those that were predicted seldom so far."""

    def __init__(self):
        super().__init__()
        self.pixels = 0

    def forward(self, probabilities):
        self.pixels = self.pixels + probabilities.detach().sum((0, 2, 3))
        return 1 / torch.log(1.1 + self.pixels / self.pixels.sum())


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.classes, self.frequencies = nn.Conv2d(8, 3, 1), Frequencies()

    def forward(self, images):
        logits = self.classes(self.stem(images))
        return logits, self.frequencies(logits.softmax(1))


def train(model, side, steps=12):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    images = torch.rand(4, 3, side, side)
    masks = images.argmax(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits, weights = model(images)
        loss = (nn.functional.cross_entropy(logits.float(), masks, reduction="none") * weights[masks].float()).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
print(json.dumps(train(Segmenter(), side=16 if "--twin" in sys.argv else 56)))
