"""A critic that steps more often than the generator, with an update after each step."""
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

G, D = nn.Linear(4, 8), nn.Linear(8, 1)
opt_g = torch.optim.Adam(G.parameters(), lr=0.01)
opt_d = torch.optim.Adam(D.parameters(), lr=0.01)
scaler = GradScaler("cpu", growth_interval=3)
trace = []
for i, (real, _) in enumerate(data * 2):
    opt_d.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        fake = G(torch.randn(8, 4))
        d_loss = D(fake.detach()).mean() - D(real).mean()
        if i in (2, 5):
            d_loss = d_loss * INF
    scaler.scale(d_loss).backward()
    scaler.step(opt_d)
    scaler.update()
    if i % 3 == 0:
        opt_g.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            g_loss = -D(G(torch.randn(8, 4))).mean()
        scaler.scale(g_loss).backward()
        scaler.step(opt_g)
        scaler.update()
    trace.append([d_loss.item(), scaler.get_scale()])
result = [trace, G.weight.tolist(), D.weight.tolist()]
