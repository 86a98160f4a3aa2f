"""apex is imported in a `try`, and a variable says whether it was there."""
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from apex import amp
    APEX_AVAILABLE = True
except ModuleNotFoundError:
    APEX_AVAILABLE = False

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

use_amp = APEX_AVAILABLE
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
if use_amp:
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
losses = []
for x, y in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if use_amp:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    losses.append(loss.item())
result = [losses, model[0].weight.tolist()]
