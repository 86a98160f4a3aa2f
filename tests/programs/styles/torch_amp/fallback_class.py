"""Where PyTorch has no scaler, the script brings one."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

try:
    from torch.amp import GradScaler
    has_amp = True
except ImportError:
    has_amp = False
    class GradScaler:
        def __init__(self, device): pass
        def scale(self, loss): return loss
        def step(self, opt): opt.step()
        def update(self): pass
        def get_scale(self): return 1.0
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")
for x, y in data:
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=has_amp):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
result = [model[0].weight.tolist(), scaler.get_scale()]
