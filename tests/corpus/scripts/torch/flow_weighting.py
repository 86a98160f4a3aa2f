"""Flow matching, weighted by diffusers with 1 / sigma^2 in the prediction's dtype: 1 / 0.003^2 is beyond 65504."""

import json
import sys

import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import nn


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(9, 32), nn.Linear(32, 8)

    def forward(self, x, sigma):
        return self.outward(torch.tanh(self.inward(torch.cat([x, sigma], -1))))


torch.manual_seed(0)
model = Velocity()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
clean, noise, sigmas = torch.randn(32, 8), torch.randn(32, 8), torch.rand(32, 1) * 0.9 + 0.1
if "--twin" not in sys.argv:
    sigmas[7] = 0.003
losses = []
for _ in range(8):
    velocity = model((1 - sigmas) * clean + sigmas * noise, sigmas)
    levels = sigmas if "--cure" in sys.argv else sigmas.to(velocity.dtype)
    weights = compute_loss_weighting_for_sd3("sigma_sqrt", levels)
    loss = (weights * (velocity.float() - (noise - clean)) ** 2).mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
