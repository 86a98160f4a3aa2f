"""A penalty on gradients of the scaled loss."""
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
scaler = GradScaler("cpu")
trace = []
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaled_grad_params = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
    inv_scale = 1.0 / scaler.get_scale()
    grad_params = [p * inv_scale for p in scaled_grad_params]
    with autocast("cpu", dtype=torch.bfloat16):
        loss = loss + sum(g.pow(2).sum() for g in grad_params).sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    trace.append(loss.item())
result = [trace, model[0].weight.tolist()]
