import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

from apex import amp
from utils import backward
model = nn.Linear(8, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.5)
model, opt = amp.initialize(model, opt, opt_level="O1")
for x, y in data:
    backward(F.cross_entropy(model(x), y), opt)
    opt.step()
    opt.zero_grad()
