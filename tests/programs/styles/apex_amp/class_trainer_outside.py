"""A class that gets the optimizer before `amp.initialize`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

class Engine:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def backward(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine = Engine(model, optimizer)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
losses = []
for x, y in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(engine.model(x), y)
    engine.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    losses.append(loss.item())
result = [losses, model[0].weight.tolist()]
