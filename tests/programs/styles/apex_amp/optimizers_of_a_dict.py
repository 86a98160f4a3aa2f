"""apex changes the optimizers of a dict, which steps them afterwards."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
opts = {"a": torch.optim.SGD(model[0].parameters(), lr=0.1), "b": torch.optim.SGD(model[2].parameters(), lr=0.1)}
model, wrapped = amp.initialize(model, list(opts.values()), opt_level="O1", verbosity=0)
for x, y in data:
    for o in opts.values():
        o.zero_grad()
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, wrapped) as s:
        s.backward()
    for o in opts.values():
        o.step()
result = [model[0].weight.tolist()]
