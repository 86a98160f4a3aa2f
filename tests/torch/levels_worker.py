"""One of two gloo processes on one device: trains at every level, for test_distributed_levels.py to judge."""

import json
import math
import pathlib
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampx

STEPS = 4
OVERFLOWS = 1  # the step in which the loss of rank 0 is infinite


def batch(step, rank):
    """One rank's half of the global batch of a step."""
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    return whole[2 * rank : 2 * rank + 2]


def train(rank, device, level, dtype, fused):
    scale = ampx.LossScale(growth_interval=2)
    amp = ampx.init(
        "torch", device=device, level=level, loss_scale=scale, **({} if level == "O0" else {"dtype": dtype})
    )
    torch.manual_seed(rank)  # DistributedDataParallel gives all ranks the weights of rank 0
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    if level in ("O2", "O3"):
        model, optimizer = amp.prepare(model, optimizer)
    optimizer = amp.wrap_optimizer(optimizer, process_group=dist.group.WORLD)
    parallel = DistributedDataParallel(model)
    steps = []
    for step in range(STEPS):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss = parallel(batch(step, rank).to(device, model[0].weight.dtype)).float().pow(2).mean()
        with ampx.scale_loss(loss * math.inf if step == OVERFLOWS and rank == 0 else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        result = optimizer.last_step
        same = all(map(torch.equal, before, model.parameters()))
        steps.append([result.applied, result.scale, result.next_scale, same])
    ampx.shutdown()
    return {
        "steps": steps,
        "dtypes": [str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()],
        "devices": sorted({parameter.device.type for parameter in model.parameters()}),
        "weights": torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()]).tolist(),
    }


def main(rank, folder):
    torch.set_num_threads(1)
    asked = json.loads((folder / "asked.json").read_text())
    for name, case in asked["cases"].items():
        dist.init_process_group("gloo", f"file://{folder}/{name}.store", timedelta(seconds=20), rank=rank, world_size=2)
        try:
            result = train(rank, asked["device"], *case)
        except Exception:  # the other cases still count
            result = {"error": traceback.format_exc()}
            ampx.shutdown()
        dist.destroy_process_group()
        (folder / f"{name}.{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
