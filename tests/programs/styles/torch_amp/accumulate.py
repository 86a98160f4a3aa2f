"""Accumulation, clipping, and a loss that overflows."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]
INF = float("inf")

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scaler = GradScaler("cpu", growth_interval=2)
accum = 2
trace = []
optimizer.zero_grad()
for i, (x, y) in enumerate(data * 2):
    with autocast(device_type="cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) / accum
        if i == 5:
            loss = loss * INF
    scaler.scale(loss).backward()
    if (i + 1) % accum == 0:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    trace.append([loss.item(), scaler.get_scale()])
result = [trace, model[0].weight.tolist()]
