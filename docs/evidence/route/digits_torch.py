"""Train a network in PyTorch to read handwritten digits; nothing here knows of mixed precision."""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
torch.manual_seed(0)

digits = load_digits()  # 1797 images of 8 by 8 pixels, which come with scikit-learn
images = torch.tensor(digits.data * 256, dtype=torch.float32)  # as a camera of 12 bits has them
labels = torch.tensor(digits.target)
random = np.random.default_rng(0)


class Standardize(nn.Module):
    """Bring each row to mean 0 and variance 1."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance + 1e-3).sqrt()


model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), Standardize(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(options.steps):
    rows = random.integers(len(images), size=128)
    loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
