"""A class around the scaler whose objects are called."""
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

class NativeScaler:
    state_dict_key = "amp_scaler"
    def __init__(self):
        self._scaler = GradScaler("cpu")
    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if update_grad:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()
    def state_dict(self):
        return self._scaler.state_dict()

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loss_scaler = NativeScaler()
trace = []
for i, (x, y) in enumerate(data):
    with autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss_scaler(loss, optimizer, clip_grad=0.1, parameters=model.parameters(), update_grad=(i + 1) % 2 == 0)
    if (i + 1) % 2 == 0:
        optimizer.zero_grad()
    trace.append(loss.item())
result = [trace, model[0].weight.tolist()]
