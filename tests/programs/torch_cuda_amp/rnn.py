"""A recurrent network that reads rows of handwritten digits; gradients are clipped by value."""

import argparse
import json
import warnings

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.cuda import amp

warnings.simplefilter("ignore", FutureWarning)

parser = argparse.ArgumentParser()
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--num_epochs", type=int, default=6)
parser.add_argument("--hidden_size", type=int, default=48)
args = parser.parse_args()
torch.manual_seed(5)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

digits = load_digits()
rows = torch.tensor(digits.images, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(rows))
x_train, y_train, x_test, y_test = rows[order[:1400]], labels[order[:1400]], rows[order[1400:]], labels[order[1400:]]


class RNN(nn.Module):
    def __init__(self, input_size, hidden_size, num_classes):
        super().__init__()
        self.cell = nn.GRUCell(input_size, hidden_size)
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x):
        h = torch.zeros(x.size(0), self.cell.hidden_size, device=x.device)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        return self.fc(h)


model = RNN(8, args.hidden_size, 10).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
scaler = amp.GradScaler(init_scale=2.0**12, growth_interval=50, enabled=not args.no_amp)
history = []
for epoch in range(args.num_epochs):
    for batch in torch.randperm(len(x_train)).split(50):
        images, targets = x_train[batch].to(device), y_train[batch].to(device)
        with amp.autocast(enabled=not args.no_amp):
            loss = criterion(model(images), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        history.append(loss.item())
    print(f"Epoch [{epoch + 1}/{args.num_epochs}], Loss: {loss.item():.4f}")

with torch.no_grad():
    accuracy = (model(x_test.to(device)).argmax(1).cpu() == y_test).float().mean().item()
print(f"Test Accuracy: {100 * accuracy:.2f} %")
print(json.dumps({"losses": history, "metric": accuracy}))
