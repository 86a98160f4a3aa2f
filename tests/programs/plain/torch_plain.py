"""Train a small convolutional network on handwritten digits."""

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.norm(self.conv2(x))), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return functional.log_softmax(self.fc2(x), dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train, test = order[:1400], order[1400:]
    data = torch.utils.data.TensorDataset(images[train], labels[train])
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = functional.nll_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if batch % 10 == 0:
                print(f"Train Epoch: {epoch} [{batch * args.batch_size}/{len(data)}]\tLoss: {loss.item():.6f}")
        scheduler.step()

    model.eval()
    with torch.no_grad():
        predicted = model(images[test].to(device)).argmax(dim=1).cpu()
    accuracy = (predicted == labels[test]).float().mean().item()
    print(f"Test accuracy: {accuracy:.4f}")
    print(json.dumps({"losses": losses, "metric": accuracy}))


if __name__ == "__main__":
    main()
