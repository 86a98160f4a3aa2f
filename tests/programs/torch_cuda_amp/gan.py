"""A generative adversarial network with two optimizers and a scaler for each, on handwritten digits."""

import argparse
import json
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

warnings.simplefilter("ignore", FutureWarning)

parser = argparse.ArgumentParser()
parser.add_argument("--no-amp", dest="amp", action="store_false")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--latent", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(4)
device = "cuda" if torch.cuda.is_available() else "cpu"
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(args.latent, 128), nn.BatchNorm1d(128), nn.ReLU(True), nn.Linear(128, 64), nn.Tanh()
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(64, 96), nn.LeakyReLU(0.2, True), nn.Dropout(0.1), nn.Linear(96, 1))

    def forward(self, x):
        return self.main(x)


generator, discriminator = Generator().to(device), Discriminator().to(device)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
scaler_g, scaler_d = torch.cuda.amp.GradScaler(enabled=args.amp), torch.cuda.amp.GradScaler(enabled=args.amp)
criterion = nn.BCEWithLogitsLoss()
history = []
for epoch in range(args.epochs):
    for real in images[torch.randperm(len(images))].split(64)[:-1]:
        real = real.to(device)
        valid, invalid = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)

        generator.zero_grad()
        with torch.cuda.amp.autocast(enabled=args.amp):
            fake = generator(torch.randn(len(real), args.latent, device=device))
            loss_g = criterion(discriminator(fake), valid)
        scaler_g.scale(loss_g).backward()
        scaler_g.step(optimizer_g)
        scaler_g.update()

        discriminator.zero_grad()
        with torch.cuda.amp.autocast(enabled=args.amp):
            loss_d = criterion(discriminator(real), valid) + criterion(discriminator(fake.detach()), invalid)
        scaler_d.scale(loss_d).backward()
        scaler_d.step(optimizer_d)
        scaler_d.update()
        history.append(loss_d.item() + loss_g.item())
    print(f"[Epoch {epoch}/{args.epochs}] [D loss: {loss_d.item():.4f}] [G loss: {loss_g.item():.4f}]")

generator.eval()
with torch.no_grad():
    fake = generator(torch.randn(512, args.latent, device=device)).float().cpu()
print(json.dumps({"losses": history, "metric": (fake.mean(0) - images.mean(0)).abs().mean().item()}))
