"""A scaler in the branch of a switch, and the switch wherever it is used."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

def train(args):
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if args.use_amp:
        scaler = torch.amp.GradScaler("cpu", init_scale=32768.0)
    result = []
    for step, (x, y) in enumerate(data):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.use_amp):
            loss = F.cross_entropy(model(x), y)
        if args.use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if (step + 1) % 2 == 0:
            if args.use_amp:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if args.use_amp:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        result.append(loss.item())
    return [result, model.weight.tolist()]

parser = argparse.ArgumentParser()
parser.add_argument("--use_amp", action="store_true")
result = train(parser.parse_args())
