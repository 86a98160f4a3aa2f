"""A method with the backward of two optimizers that another method steps."""
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

class T:
    def __init__(self):
        self.a, self.b = net(), net()
        self.opt_a = torch.optim.SGD(self.a.parameters(), lr=0.1)
        self.opt_b = torch.optim.SGD(self.b.parameters(), lr=0.1)
        self.scaler = GradScaler("cpu")
    def backward(self, loss):
        self.scaler.scale(loss).backward()
    def step(self, x, y):
        self.opt_a.zero_grad(); self.opt_b.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.a(x) + self.b(x), y)
        self.backward(loss)
        self.scaler.step(self.opt_a)
        self.scaler.step(self.opt_b)
        self.scaler.update()
        return loss.item()
t = T()
result = [[t.step(x, y) for x, y in data], t.a[0].weight.tolist()]
