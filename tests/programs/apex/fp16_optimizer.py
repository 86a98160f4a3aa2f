"""A perceptron on scikit-learn's digits with FP16_Optimizer, the way of Apex before amp."""

import argparse
import json

import torch
import torch.nn as nn
from apex.fp16_utils import FP16_Optimizer, network_to_half
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--seed", default=3, type=int)
parser.add_argument("--opt-level", default="O2", help="O0 trains in float32; any other is --fp16")
parser.add_argument("--fp16", action="store_true", help="Run model fp16 mode.")
parser.add_argument("--static-loss-scale", type=float, default=1)
parser.add_argument("--dynamic-loss-scale", action="store_true")
args = parser.parse_args()
args.fp16 = args.fp16 or args.opt_level != "O0"

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
digits = load_digits()
images = torch.from_numpy(digits.data).float().to(device) / 16.0
labels = torch.from_numpy(digits.target).long().to(device)
order = torch.randperm(len(images))
images, labels = images[order], labels[order]

model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)).to(device)
if args.fp16:
    model = network_to_half(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
if args.fp16:
    optimizer = FP16_Optimizer(
        optimizer,
        static_loss_scale=args.static_loss_scale,
        dynamic_loss_scale=args.dynamic_loss_scale,
        dynamic_loss_args={"init_scale": 2.0**16},
        verbose=False,
    )

losses = []
for epoch in range(args.epochs):
    model.train()
    for i in range(1437 // 64):
        input, target = images[i * 64 : i * 64 + 64], labels[i * 64 : i * 64 + 64]
        loss = criterion(model(input).float(), target)
        optimizer.zero_grad()
        if args.fp16:
            optimizer.backward(loss)
            optimizer.clip_master_grads(5.0)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"Epoch: [{epoch}] Loss {losses[-1]:.4f}")

model.eval()
with torch.no_grad():
    accuracy = model(images[1437:]).max(1)[1].eq(labels[1437:]).float().mean().item()
print(json.dumps({"losses": losses, "metric": accuracy}))
