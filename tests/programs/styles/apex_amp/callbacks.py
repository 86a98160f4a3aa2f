"""Functions of a list are called between backward and step; they read gradients."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, opt_level="O1", verbosity=0)

values = []
def cb(m):
    values.append(str(float(m[0].weight.grad.abs().max())))
callbacks = [cb]
for x, y in data:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, opt) as s:
        s.backward()
    for c in callbacks:
        c(model)
    opt.step()
result = [values, model[0].weight.tolist()]
