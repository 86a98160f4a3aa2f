"""Losses come from a generator, scaled backwards from another."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

def losses(model):
    for x, y in data:
        with autocast("cpu", dtype=torch.float16):
            yield F.cross_entropy(model(x), y)
def scaled(model, scaler):
    for loss in losses(model):
        scaler.scale(loss).backward()
        yield loss
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")
out = []
for loss in scaled(model, scaler):
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    out.append(loss.item())
result = [out, model[0].weight.tolist(), scaler.get_scale()]
