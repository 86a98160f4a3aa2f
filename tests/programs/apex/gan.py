"""A GAN on scikit-learn's digits with one optimizer and two losses for the discriminator, as in DCGAN."""

import argparse
import json
import random

import torch
import torch.nn as nn
import torch.optim as optim
from apex import amp
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=64, help="input batch size")
parser.add_argument("--nz", type=int, default=16, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--niter", type=int, default=4, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=0.0005, help="learning rate")
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
parser.add_argument("--manualSeed", type=int, default=2809, help="manual seed")
parser.add_argument("--opt-level", "--opt_level", dest="opt_level", default="O1", help="amp opt_level")
opt = parser.parse_args()
print(opt)

random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8.0 - 1.0
dataset = torch.utils.data.TensorDataset(images)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize, shuffle=True, drop_last=True)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 3, 1, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


net_g = Generator(opt.nz, opt.ngf).to(device)
net_g.apply(weights_init)
net_d = Discriminator(opt.ndf).to(device)
net_d.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(opt.batchSize, opt.nz, 1, 1, device=device)
real_label, fake_label = 1.0, 0.0

optimizer_d = optim.Adam(net_d.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizer_g = optim.Adam(net_g.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

[net_d, net_g], [optimizer_d, optimizer_g] = amp.initialize(
    [net_d, net_g], [optimizer_d, optimizer_g], opt_level=opt.opt_level, num_losses=3
)

losses = []
for epoch in range(opt.niter):
    for i, data in enumerate(dataloader, 0):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        # train with real
        net_d.zero_grad()
        real = data[0].to(device)
        batch_size = real.size(0)
        label = torch.full((batch_size,), real_label, device=device)
        output = net_d(real)
        err_d_real = criterion(output, label)
        with amp.scale_loss(err_d_real, optimizer_d, loss_id=0) as err_d_real_scaled:
            err_d_real_scaled.backward()
        d_x = output.mean().item()

        # train with fake
        noise = torch.randn(batch_size, opt.nz, 1, 1, device=device)
        fake = net_g(noise)
        label.fill_(fake_label)
        output = net_d(fake.detach())
        err_d_fake = criterion(output, label)
        with amp.scale_loss(err_d_fake, optimizer_d, loss_id=1) as err_d_fake_scaled:
            err_d_fake_scaled.backward()
        d_g_z1 = output.mean().item()
        err_d = err_d_real + err_d_fake
        optimizer_d.step()

        # (2) Update G network: maximize log(D(G(z)))
        net_g.zero_grad()
        label.fill_(real_label)  # fake labels are real for generator cost
        output = net_d(fake)
        err_g = criterion(output, label)
        with amp.scale_loss(err_g, optimizer_g, loss_id=2) as err_g_scaled:
            err_g_scaled.backward()
        optimizer_g.step()

        losses.append(err_d.item() + err_g.item())
        if i % 10 == 0:
            print(
                f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {err_d.item():.4f} Loss_G: {err_g.item():.4f} "
                f"D(x): {d_x:.4f} D(G(z)): {d_g_z1:.4f}"
            )

with torch.no_grad():
    generated = net_g(fixed_noise).float()
print(json.dumps({"losses": losses, "metric": (generated.mean().cpu() - images.mean()).abs().item()}))
