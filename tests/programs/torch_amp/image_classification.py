"""Train a convolutional network on handwritten digits with automatic mixed precision."""

import argparse
import json

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from sklearn.datasets import load_digits
from torch import nn
from torch.amp import GradScaler, autocast


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train(args, model, loader, optimizer, scaler, epoch, losses):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16, enabled=args.amp):
            output = model(data)
            loss = F.cross_entropy(output, target)
        # Scales the loss, and calls backward() on the scaled loss.
        scaler.scale(loss).backward()
        # Unscales the gradients in place, so that they can be clipped as usual.
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        # Updates the scale for the next iteration.
        scaler.update()
        losses.append(loss.item())
        if batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}]\tLoss: {loss.item():.6f}")


@torch.no_grad()
def test(args, model, images, labels):
    model.eval()
    with autocast("cpu", dtype=torch.float16, enabled=args.amp):
        output = model(images)
    accuracy = (output.argmax(1) == labels).float().mean().item()
    print(f"Test set: Accuracy: {100 * accuracy:.1f}%")
    return accuracy


def main():
    parser = argparse.ArgumentParser(description="PyTorch digits example")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_set = torch.utils.data.TensorDataset(images[:1347], labels[:1347])
    loader = torch.utils.data.DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = GradScaler("cpu", enabled=args.amp)

    losses = []
    for epoch in range(1, args.epochs + 1):
        train(args, model, loader, optimizer, scaler, epoch, losses)
        scheduler.step()
        if epoch == 2:  # as after an interruption
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            }
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scaler.load_state_dict(checkpoint["scaler"])
    accuracy = test(args, model, images[1347:], labels[1347:])
    print(json.dumps({"losses": losses, "metric": accuracy}))


if __name__ == "__main__":
    main()
