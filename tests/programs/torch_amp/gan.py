"""A generative adversarial network on handwritten digits: two optimizers, one scaler."""

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=64, help="input batch size")
parser.add_argument("--nz", type=int, default=16, help="size of the latent z vector")
parser.add_argument("--niter", type=int, default=6, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
parser.add_argument("--manualSeed", type=int, default=0)
parser.add_argument("--fp32", action="store_true", help="no mixed precision")
opt = parser.parse_args()

torch.manual_seed(opt.manualSeed)
images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1
dataloader = torch.utils.data.DataLoader(images, batch_size=opt.batchSize, shuffle=True, drop_last=True)

net_g = nn.Sequential(nn.Linear(opt.nz, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
net_d = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
criterion = nn.BCEWithLogitsLoss()

optimizer_d = torch.optim.Adam(net_d.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=not opt.fp32)

losses = []
for epoch in range(opt.niter):
    for real in dataloader:
        noise = torch.randn(opt.batchSize, opt.nz)
        ones, zeros = torch.ones(opt.batchSize, 1), torch.zeros(opt.batchSize, 1)

        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        optimizer_d.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=not opt.fp32):
            err_d_real = criterion(net_d(real), ones)
            fake = net_g(noise)
            err_d_fake = criterion(net_d(fake.detach()), zeros)
        scaler.scale(err_d_real).backward()
        scaler.scale(err_d_fake).backward()
        scaler.step(optimizer_d)

        # (2) Update G network: maximize log(D(G(z)))
        optimizer_g.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=not opt.fp32):
            err_g = criterion(net_d(fake), ones)
        scaler.scale(err_g).backward()
        scaler.step(optimizer_g)
        scaler.update()

        losses.append(err_d_real.item() + err_d_fake.item() + err_g.item())
    print(f"[{epoch}/{opt.niter}] Loss_D: {(err_d_real + err_d_fake).item():.4f} Loss_G: {err_g.item():.4f}")

with torch.no_grad():
    fake = net_g(torch.randn(256, opt.nz)).float()
distance = (fake.mean(0) - images.mean(0)).abs().mean().item()
print(json.dumps({"losses": losses, "metric": distance}))
