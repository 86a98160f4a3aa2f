"""A scaler of the base class, used in the subclass."""
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

class Base:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.scaler = GradScaler("cpu")

class Trainer(Base):
    def step(self, x, y):
        self.optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

model = net()
trainer = Trainer(model)
trace = [trainer.step(x, y) for x, y in data]
result = [trace, model[0].weight.tolist()]
