"""One of two processes of an unedited script that averages gradients by hand; only the second one overflows in float16.

It trains under `ampx run`, and leaves weights and loss scales in a file.
"""

import datetime
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from ampx.backend import offer
from ampx.errors import PrecisionWarning
from ampx.plugins import default_registry
from ampx.run import Automation, Run, RunSettings

STEPS = 24


def train(rank):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, 4, generator=generator) * (30.0 if rank else 1.0)
        optimizer.zero_grad()
        ((net(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad.data)
            p.grad.data /= 2
        optimizer.step()
    return [p.flatten().tolist() for p in net.parameters()]


def main(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PrecisionWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    run = Run("torch", RunSettings(dtype="float16", device="cpu"))
    with offer(default_registry().load("torch"), Automation).automate(run):
        automated = train(rank)
    report = {"automated": automated, **run.recorder.to_json()}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
