"""Optimizers in a dict."""
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
optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.5)}
scaler = GradScaler("cpu")
trace = []
for x, y in data:
    optimizers["main"].zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizers["main"])
    scaler.update()
    trace.append(loss.item())
result = [trace, model[0].weight.tolist()]
