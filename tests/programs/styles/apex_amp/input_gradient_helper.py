"""A helper that returns the gradient of the input, with mixed precision or without."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

def get_input_grad(model, X, y, opt, eps, delta_init='none', half_prec=True):
    delta = torch.zeros_like(X)
    delta.requires_grad = True
    output = model(X + delta)
    loss = F.cross_entropy(output, y)
    if half_prec:
        with amp.scale_loss(loss, opt) as scaled_loss:
            grad = torch.autograd.grad(scaled_loss, delta)[0]
            grad = grad / (scaled_loss / loss).detach()
    else:
        grad = torch.autograd.grad(loss, delta)[0]
    return grad

parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true")
args = parser.parse_args()
half_prec = not args.full
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
if half_prec:
    model, opt = amp.initialize(model, opt, opt_level="O1")
losses = []
for x, y in data:
    grad = get_input_grad(model, x, y, opt, 0.1, half_prec=half_prec)
    loss = F.cross_entropy(model(x + 0.1 * grad.sign()), y)
    opt.zero_grad()
    if half_prec:
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    opt.step()
    losses.append([loss.item(), grad.abs().sum().item()])
result = [losses, model[0].weight.tolist()]
