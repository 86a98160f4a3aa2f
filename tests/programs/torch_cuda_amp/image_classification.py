"""Image classification with native automatic mixed precision, in the style of the PyTorch examples of 2020."""

import argparse
import json
import random
import warnings

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.cuda.amp import GradScaler, autocast

warnings.simplefilter("ignore", FutureWarning)

parser = argparse.ArgumentParser(description="PyTorch digits training")
parser.add_argument("--epochs", default=4, type=int, help="number of total epochs to run")
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--no-amp", action="store_true", help="train in fp32")


class BasicBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def train(loader, model, criterion, optimizer, scaler, epoch, device, args, history):
    losses = AverageMeter()
    model.train()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with autocast(enabled=not args.no_amp):
            output = model(images)
            loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        history.append(loss.item())

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % 10 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}]\tLoss {loss.item():.4e} ({losses.avg:.4e})")


@torch.no_grad()
def validate(images, labels, model, device, args):
    model.eval()
    with autocast(enabled=not args.no_amp):
        output = model(images.to(device))
    return (output.argmax(1).cpu() == labels).float().mean().item()


def main():
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    dataset = torch.utils.data.TensorDataset(images[order[:1400]], labels[order[:1400]])
    loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)

    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), BasicBlock(16), nn.MaxPool2d(2), BasicBlock(16))
    model = nn.Sequential(stem, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = GradScaler(enabled=not args.no_amp)
    history = []
    for epoch in range(args.epochs):
        train(loader, model, criterion, optimizer, scaler, epoch, device, args, history)
        scheduler.step()
    accuracy = validate(images[order[1400:]], labels[order[1400:]], model, device, args)
    print(f" * Acc@1 {100 * accuracy:.3f}")
    print(json.dumps({"losses": history, "metric": accuracy}))


if __name__ == "__main__":
    main()
