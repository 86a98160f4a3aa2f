import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
data = [(X[i:i+8], Y[i:i+8]) for i in range(0, 64, 8)]

import argparse
from pkg.training import Executor, TrainLoop
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true", default=True)
parser.add_argument("--static-loss-scale", type=float, default=1)
args = parser.parse_args()

def prepare_for_training(args):
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=args.static_loss_scale,
        growth_factor=2,
        backoff_factor=0.5,
        growth_interval=100,
        enabled=args.amp,
    )
    executor = Executor(model, nn.CrossEntropyLoss(), scaler=scaler)
    return TrainLoop(executor, optimizer)

loop = prepare_for_training(args)
result = [loop.run(data), loop.executor.model.weight.tolist()]
