"""One of two gloo processes: trains with apex.amp and DistributedDataParallel, and writes what came of it."""

import json
import pathlib
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ampx.errors import PrecisionWarning
from ampx_torch.apex import amp
from ampx_torch.apex.parallel import DistributedDataParallel as ApexParallel

INFINITE = float("inf")


def train(rank, opt_level, wrap, overflow_at):
    """Two blocks a step, of which the first is delayed in the last step; every process has its own batches."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 64.0
    parallel = wrap(model)
    applied = []
    for step in range(4):
        optimizer.zero_grad()
        for position in range(2):
            value = (step + 1.0) * (rank + 1) * (position + 1)
            if (step, rank, position) == overflow_at:
                value = INFINITE
            loss = parallel(torch.full((1, 4), value)).sum()
            with amp.scale_loss(loss, optimizer, delay_unscale=step == 3 and position == 0) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        applied.append(optimizer.last_step.applied)
    return {
        "weight": model.state_dict()["weight"].tolist(),
        "applied": applied,
        "amp": amp.state_dict(),
    }


def main(rank, folder):
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", PrecisionWarning)  # some CPUs compute float16 in software
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {
        f"{opt_level} {wrap.__module__.partition('.')[0]} {overflow_at}": train(rank, opt_level, wrap, overflow_at)
        for opt_level in ("O1", "O2")
        for wrap in (nn.parallel.DistributedDataParallel, ApexParallel)
        for overflow_at in (None, (1, 1, 0))
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
