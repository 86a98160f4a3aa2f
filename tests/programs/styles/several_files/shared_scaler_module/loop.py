import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

import state
from state import scaler, optimizer
trace = []
for x, y in data:
    state.optimizer.zero_grad()
    loss = F.cross_entropy(state.model(x), y)
    scaler.scale(loss).backward()
    state.scaler.step(state.optimizer)
    scaler.update()
    trace.append([loss.item(), state.scaler.get_scale()])
result = [trace, state.model.weight.tolist()]
