"""A class with methods for backward, clipping and the step."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

class Trainer:
    def __init__(self, model, lr=0.5, opt_level="O1"):
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=opt_level)
        self.norms = []

    def backward(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def clip(self):
        norm = 0.0
        for p in self.model.parameters():
            if p.grad is not None:
                norm += p.grad.data.norm(2).item() ** 2
        self.norms.append(norm ** 0.5)
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.backward(loss)
        self.clip()
        self.optimizer.step()
        return loss.item()

    def fit(self, data):
        return [self.step(x, y) for x, y in data]

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
trainer = Trainer(model)
losses = trainer.fit(data)
result = [losses, trainer.norms, model[0].weight.tolist()]
