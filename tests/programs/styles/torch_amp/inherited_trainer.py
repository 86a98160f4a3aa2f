"""A base class makes the scaler, a subclass the optimizer."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

class Base:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.scaler = GradScaler("cpu")
        self.build()
    def build(self):
        raise NotImplementedError
    def one(self, x, y):
        with autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.model(x), y)
        self.backward(loss)
    def backward(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
class Trainer(Base):
    def build(self):
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
    def train(self):
        for x, y in data:
            self.opt.zero_grad()
            self.one(x, y)
trainer = Trainer()
trainer.train()
result = [trainer.model[0].weight.tolist(), trainer.scaler.get_scale()]
