"""SSIM of torchmetrics as a loss: a variance in bfloat16, a mean of squares minus a square, has lost its digits."""

import json
import sys

import torch
from torch import nn
from torchmetrics.functional.image import structural_similarity_index_measure

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid())
with torch.no_grad():
    model[2].bias.fill_(0.0 if "--twin" in sys.argv else 2.0)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
texture = torch.rand(2, 1, 16, 16)
images = texture if "--twin" in sys.argv else 0.85 + 0.05 * texture
losses = []
for _ in range(20):
    restored = model(images)
    if {"--cure", "--twin"} & {*sys.argv}:
        with torch.autocast("cpu", enabled=False):
            similarity = structural_similarity_index_measure(restored.float(), images, data_range=1.0)
    else:
        similarity = structural_similarity_index_measure(restored, images.to(restored.dtype), data_range=1.0)
    loss = 1 - similarity.float()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
