"""An attrgetter reads gradients."""
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

import operator
get = operator.attrgetter("grad")
vals = []
for x, y in data:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, opt) as s:
        s.backward()
    vals.append(str(sum(float(g.norm()) for g in map(get, model.parameters()))))
    opt.step()
result = [vals, model[0].weight.tolist()]
