import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

from torch.amp import GradScaler
import engine
from engine import train_one_epoch

def main():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = GradScaler("cpu")
    trace = []
    for epoch in range(3):
        trace += train_one_epoch(model, optimizer, data, epoch, scaler=scaler)
        scheduler.step()
        trace.append(engine.evaluate(model, data))
    return [trace, scaler.get_scale(), model[0].weight.tolist()]

if __name__ == "__main__":
    result = main()
