"""The error of a validation is added up in bfloat16 and stays at 512; a schedule takes it for a plateau."""

import json
import sys

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(24, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, windows):
        return self.head(self.encoder(windows))[:, 0]


@torch.no_grad()
def validate(model, windows, targets):
    total = 0.0
    for window, target in zip(windows, targets, strict=True):
        output = model(window[None])
        error = (output - target.to(output.dtype)).abs().mean()
        total = total + (error.float() if "--cure" in sys.argv else error)
    return (total / len(windows)).item()


torch.manual_seed(0)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
windows = torch.randn(540, 6, 4)
targets = windows[:, -1].sum(-1)
held_out = 40 if "--twin" in sys.argv else 440  # windows of the validation
losses = []
for _ in range(12):
    loss = nn.functional.mse_loss(model(windows[:100]).float(), targets[:100])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step(validate(model, windows[100 : 100 + held_out], targets[100 : 100 + held_out]))
    losses.append(loss.item())
print(json.dumps(losses))
