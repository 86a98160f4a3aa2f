"""An attack on a perturbation that the caller made: whose gradient is read cannot be told."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

def perturb(model, x, y, delta, opt):
    for _ in range(3):
        loss = F.cross_entropy(model(x + delta), y)
        with amp.scale_loss(loss, opt) as s:
            s.backward()
        grad = delta.grad.detach()
        delta.data = delta + 0.01 * torch.sign(grad)
        delta.grad.zero_()
    return delta

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O1")
delta = torch.zeros(8, 8, requires_grad=True)
losses = []
for x, y in data:
    perturb(model, x, y, delta, opt)
    opt.zero_grad()
    loss = F.cross_entropy(model(x + delta.detach()), y)
    with amp.scale_loss(loss, opt) as s:
        s.backward()
    opt.step()
    losses.append(loss.item())
result = [losses, model[0].weight.tolist()]
