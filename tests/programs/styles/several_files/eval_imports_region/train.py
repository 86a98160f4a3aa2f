import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

model = nn.Linear(8, 3)

def evaluate(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [F.cross_entropy(model(x), y).item() for x, y in data]

def main():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu")
    trace = []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append(loss.item())
    return [trace, evaluate(model)]

if __name__ == "__main__":
    result = main()
