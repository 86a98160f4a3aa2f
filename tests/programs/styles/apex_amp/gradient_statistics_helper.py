"""Functions that read gradients for the log, now and then."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

def grad_stats(named_parameters):
    ave = []
    for n, p in named_parameters:
        if p.requires_grad and "bias" not in n:
            ave.append(p.grad.abs().mean().item())
    return ave

def log(model, history):
    history.append(grad_stats(model.named_parameters()))

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
losses, history = [], []
for i, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    if i % 2 == 0:
        log(model, history)
    optimizer.step()
    losses.append(loss.item())
result = [losses, history, model[0].weight.tolist()]
