import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

from base import Base
class Mine(Base):
    def fit(self):
        trace = []
        for x, y in data:
            loss = F.cross_entropy(self.model(x), y)
            self.update(loss)
            trace.append([loss.item(), self.scaler.get_scale()])
        return trace
mine = Mine(nn.Linear(8, 3))
result = [mine.fit(), mine.model.weight.tolist()]
