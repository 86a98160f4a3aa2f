"""The scale is compared before and after `update`."""
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
scaler = GradScaler("cpu")
trace = []
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y) * (INF if i in (1, 2) else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skip = scale > scaler.get_scale()
    if not skip:
        scheduler.step()
    trace.append([loss.item(), skip, scheduler.get_last_lr()])
result = [trace, model[0].weight.tolist()]
