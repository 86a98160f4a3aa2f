"""A forward pass that is decorated, and called before there is a scaler."""
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

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)
    @autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return self.fc(x)

model = Net()
before = model(X[:1]).dtype   # there is no session yet
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = GradScaler("cpu")
trace = []
for x, y in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    trace.append(loss.item())
result = [trace, model.fc.weight.tolist()]
