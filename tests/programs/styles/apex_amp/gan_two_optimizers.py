"""Two networks, two optimizers, two losses."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
D = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
opt_G = torch.optim.Adam(G.parameters(), lr=0.01)
opt_D = torch.optim.Adam(D.parameters(), lr=0.01)
[G, D], [opt_G, opt_D] = amp.initialize([G, D], [opt_G, opt_D], opt_level="O1", num_losses=2)
bce = nn.BCEWithLogitsLoss()
losses = []
for i, (real, _) in enumerate(data):
    z = torch.randn(8, 4)
    fake = G(z)
    opt_D.zero_grad()
    d_loss = bce(D(real), torch.ones(8, 1)) + bce(D(fake.detach()), torch.zeros(8, 1))
    with amp.scale_loss(d_loss, opt_D, loss_id=0) as scaled:
        scaled.backward()
    nn.utils.clip_grad_norm_(D.parameters(), 0.1)
    opt_D.step()
    if i % 2 == 0:
        opt_G.zero_grad()
        g_loss = bce(D(fake), torch.ones(8, 1))
        with amp.scale_loss(g_loss, opt_G, loss_id=1) as scaled:
            scaled.backward()
        opt_G.step()
    losses.append([d_loss.item(), g_loss.item()])
result = [losses, G[0].weight.tolist(), D[0].weight.tolist()]
