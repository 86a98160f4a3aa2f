"""The end of a region of the script's own reads gradients."""
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

import contextlib
vals = []
@contextlib.contextmanager
def watch():
    yield
    vals.append(str(float(model[0].weight.grad.norm())))
for x, y in data:
    opt.zero_grad()
    with watch():
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, opt) as s:
            s.backward()
    opt.step()
result = [vals, model[0].weight.tolist()]
