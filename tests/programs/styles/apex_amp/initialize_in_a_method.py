"""A method of its own initializes what __init__ made."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

class T:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 2)
    def to_amp(self):
        self.net, self.opt = amp.initialize(self.net, self.opt, opt_level="O1", verbosity=0)
    def fit(self):
        for x, y in data:
            self.opt.zero_grad()
            loss = F.cross_entropy(self.net(x), y)
            with amp.scale_loss(loss, self.opt) as s:
                s.backward()
            self.opt.step()
            self.sched.step()
t = T()
t.to_amp()
t.fit()
result = [t.net[0].weight.tolist()]
