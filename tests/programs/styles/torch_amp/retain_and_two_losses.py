"""Two backwards a step, comments inside, two statements on a line."""
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

model, head = net(), nn.Linear(3, 1)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
scaler = GradScaler("cpu")
trace = []
for i, (x, y) in enumerate(data):
    optimizer.zero_grad(set_to_none=True)
    with autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        loss1 = F.cross_entropy(out, y)
        loss2 = head(out).float().pow(2).mean()
    scaler.scale(loss1).backward(
        retain_graph=True,  # the second needs it
    )
    scaler.scale(
        0.5 * loss2
    ).backward()
    scaler.step(optimizer); scaler.update()
    trace.append([loss1.item(), loss2.item()])
result = [trace, model[0].weight.tolist()]
