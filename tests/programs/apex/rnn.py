"""An LSTM that reads scikit-learn's digits row by row; it saves and resumes as the README of Apex shows."""

import argparse
import io
import json

import torch
import torch.nn as nn
from apex import amp
from sklearn.datasets import load_digits
from torch.autograd import Variable
from torch.utils.data import DataLoader, TensorDataset


class RNNClassifier(nn.Module):
    def __init__(self, input_size=8, hidden_size=48, num_layers=1, num_classes=10):
        super().__init__()
        self.rnn = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


def build(args, device):
    model = RNNClassifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    return amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale, verbosity=0)


def main():
    parser = argparse.ArgumentParser(description="RNN on digits")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--loss-scale", type=str, default=None)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_digits()
    images = torch.from_numpy(data.images).float() / 16.0
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(images))
    images, labels = images[order], labels[order]
    train_loader = DataLoader(TensorDataset(images[:1437], labels[:1437]), args.batch_size, shuffle=True)

    model, optimizer = build(args, device)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(args.epochs):
        model.train()
        for i, (data, target) in enumerate(train_loader):
            data, target = Variable(data.to(device)), Variable(target.to(device))
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
            optimizer.step()
            losses.append(loss.item())
            if i % 10 == 0:
                print(f"Train Epoch: {epoch} [{i * len(data)}/1437]\tLoss: {loss.item():.6f}")

        # Save checkpoint
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        file = io.BytesIO()
        torch.save(checkpoint, file)

    # Restore
    file.seek(0)
    checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])

    model.eval()
    with torch.no_grad():
        output = model(images[1437:].to(device))
        correct = output.max(1)[1].cpu().eq(labels[1437:]).float().mean().item()
    print(f"\nTest set: Accuracy: {correct:.4f}\n")
    print(json.dumps({"losses": losses, "metric": correct}))


if __name__ == "__main__":
    main()
