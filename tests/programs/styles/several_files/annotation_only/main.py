import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

from helpers import run
from torch.amp import GradScaler
model = nn.Linear(8, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.5)
args = sys.argv
scaler = GradScaler(*args)
run(model, opt, scaler)
