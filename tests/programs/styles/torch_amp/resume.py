"""The state of the scaler is saved and loaded."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]
INF = float("inf")

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

def main():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = GradScaler("cpu")
    trace = []
    checkpoint = None
    for epoch in range(2):
        if checkpoint is not None and "scaler" in checkpoint:
            scaler.load_state_dict(checkpoint["scaler"])
            model.load_state_dict(checkpoint["model"])
        for i, (x, y) in enumerate(data):
            optimizer.zero_grad()
            with autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y) * (INF if i == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            trace.append([loss.item(), scaler.get_scale()])
        checkpoint = dict(model=model.state_dict(), scaler=scaler.state_dict())
    return [trace, model[0].weight.tolist()]

result = main()
