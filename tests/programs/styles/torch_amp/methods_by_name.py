"""The scaler's methods have names of their own."""
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
scale, step, update = scaler.scale, scaler.step, scaler.update
for x, y in data:
    opt.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scale(loss).backward()
    step(opt)
    update()
result = [model[0].weight.tolist(), scaler.get_scale()]
