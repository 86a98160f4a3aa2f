"""A scaler only where it is asked for."""
import argparse
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

parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = GradScaler("cpu") if args.amp else None
trace = []
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
        loss = F.cross_entropy(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    trace.append(loss.item())
result = [trace, model[0].weight.tolist()]
