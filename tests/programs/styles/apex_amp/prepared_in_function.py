"""A function that returns what `amp.initialize` does, one that trains a step, and one that calls both."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

def prepare(model, optimizer, level):
    return amp.initialize(model, optimizer, opt_level=level)

def run_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    g = sum(p.grad.norm() for p in model.parameters())
    optimizer.step()
    return [loss.item(), g.item()]

def main():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = prepare(model, optimizer, "O1")
    losses = [run_step(model, optimizer, x, y) for x, y in data]
    return [losses, model[0].weight.tolist()]

if __name__ == "__main__":
    result = main()
