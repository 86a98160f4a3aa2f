"""Losses that overflow, and gradients that are clamped by hand."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic")
losses = []
for i, (x, y) in enumerate(data * 2):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y) * (float("inf") if i in (3, 4, 9) else 1.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    for param in model.parameters():
        param.grad.data.clamp_(-0.01, 0.01)
    optimizer.step()
    losses.append([loss.item(), amp.state_dict()["loss_scaler0"]["loss_scale"] if False else 0])
result = [model[0].weight.tolist()]
