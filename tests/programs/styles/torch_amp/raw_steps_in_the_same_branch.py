"""A scaler in a branch, and another switch that says whether it is used."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--do_eval", action="store_true")
args = parser.parse_args()
model = nn.Linear(8, 3)
result = []
if args.do_eval:
    result.append(F.cross_entropy(model(X), Y).item())
else:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if args.amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        result.append(loss.item())
