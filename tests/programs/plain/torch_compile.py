"""Train a residual network of fully connected layers on handwritten digits, compiled with torch.compile."""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main():
    torch.manual_seed(3)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train, test = order[:1408], order[1408:]

    model = nn.Sequential(nn.Linear(64, 64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    compiled = torch.compile(model)
    losses = []
    for epoch in range(8):
        for rows in torch.randperm(len(train)).split(64):
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(compiled(images[train[rows]]), labels[train[rows]])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    print(json.dumps({"losses": losses, "metric": accuracy}))


if __name__ == "__main__":
    main()
