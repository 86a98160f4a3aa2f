"""The exact class of the optimizer is asked for."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")
assert type(opt) is torch.optim.SGD
kinds = []
for x, y in data:
    opt.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    kinds.append(type(opt).__name__)
result = [kinds, model[0].weight.tolist(), scaler.get_scale()]
