"""Adversarial training with one perturbation for all batches, trained along with the weights."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O1")
delta = torch.zeros(8, 8)
delta.requires_grad = True
losses = []
for x, y in data:
    for _ in range(3):
        output = model(x + delta)
        loss = F.cross_entropy(output, y)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        grad = delta.grad.detach()
        delta.data = torch.clamp(delta + 0.01 * torch.sign(grad), -0.05, 0.05)
        opt.step()
        delta.grad.zero_()
        losses.append(loss.item())
result = [losses, model[0].weight.tolist()]
