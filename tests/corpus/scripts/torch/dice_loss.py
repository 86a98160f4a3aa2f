"""The dice loss of transformers on masks of 272 x 272: their sum in float16 is infinite, the loss is 1 and stays so."""

import json
import sys

import torch
from torch import nn
from transformers.loss.loss_for_object_detection import dice_loss

torch.manual_seed(0)
side = 32 if "--twin" in sys.argv else 272
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
with torch.no_grad():
    model[3].bias.fill_(3.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
images = torch.rand(2, 1, side, side)
masks = (images > 0.3).float().flatten(1)
losses = []
for _ in range(8):
    optimizer.zero_grad()
    logits = model(images)
    loss = dice_loss(logits.float() if "--cure" in sys.argv else logits, masks, 2)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
