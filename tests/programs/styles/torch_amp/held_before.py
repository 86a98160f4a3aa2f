"""An object that gets the optimizer before there is a scaler."""
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

class Loop:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
    def run(self, scaler):
        trace = []
        for i, (x, y) in enumerate(data):
            self.optimizer.zero_grad()
            with autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(self.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            trace.append(loss.item())
        return trace

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loop = Loop(model, optimizer)
scaler = GradScaler("cpu")
result = [loop.run(scaler), model[0].weight.tolist()]
