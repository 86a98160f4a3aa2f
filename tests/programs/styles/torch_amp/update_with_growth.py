"""A first scale above the bound of ampx, which goes on growing."""
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
scaler = GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
trace = []
for i, (x, y) in enumerate(data * 3):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    trace.append([loss.item(), scaler.get_scale()])
result = [trace, model[0].weight.tolist()]
