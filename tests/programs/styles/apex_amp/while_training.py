"""An endless loop, and the norm of all gradients by hand."""
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
it = iter(data)
losses = []
while True:
    try:
        x, y = next(it)
    except StopIteration:
        break
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    total_norm = 0
    parameters = [p for p in model.parameters() if p.grad is not None]
    for p in parameters:
        total_norm += p.grad.detach().norm() ** 2
    losses.append(float(total_norm) ** 0.5)
    optimizer.step()
result = [losses, model[0].weight.tolist()]
