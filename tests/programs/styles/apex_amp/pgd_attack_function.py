"""An attack of several steps that reads the gradient of its input, then a step of training."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

def attack_pgd(model, x, y, epsilon, alpha, attack_iters, opt):
    delta = torch.zeros_like(x).uniform_(-epsilon, epsilon)
    delta.requires_grad = True
    for _ in range(attack_iters):
        output = model(x + delta)
        loss = F.cross_entropy(output, y)
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        grad = delta.grad.detach()
        d = torch.clamp(delta + alpha * torch.sign(grad), -epsilon, epsilon)
        delta.data = d
        delta.grad.zero_()
    return delta.detach()

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, opt = amp.initialize(model, opt, opt_level="O1")
losses = []
for x, y in data:
    delta = attack_pgd(model, x, y, 0.05, 0.01, 4, opt)
    loss = F.cross_entropy(model(x + delta), y)
    opt.zero_grad()
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
    opt.step()
    losses.append(loss.item())
result = [losses, model[0].weight.tolist()]
