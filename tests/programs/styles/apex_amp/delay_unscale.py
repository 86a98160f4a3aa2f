"""Accumulation by `delay_unscale`."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
losses = []
for i, (x, y) in enumerate(data):
    if i % 2 == 0:
        optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer, delay_unscale=i % 2 == 0) as scaled_loss:
        scaled_loss.backward()
    if i % 2 == 1:
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.05)
        optimizer.step()
    losses.append(loss.item())
result = [losses, model[0].weight.tolist()]
