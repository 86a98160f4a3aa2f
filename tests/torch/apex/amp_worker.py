"""One of two gloo processes: trains with apex.amp in parallel, by DistributedDataParallel or by hand.

It writes what came of it as JSON.
"""

import json
import pathlib
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ampx.errors import PrecisionWarning
from ampx_torch.apex import amp, amp_c, apex_c
from ampx_torch.apex.parallel import DistributedDataParallel as ApexParallel
from ampx_torch.apex.parallel.distributed import flat_dist_call

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


def train_by_hand(rank, opt_level, way, overflow_at):
    """Two blocks a step; the gradients are averaged by the script, which leaves the models to themselves.

    "delayed" is the way of the vendor's BERT: the script reduces one flat buffer of scaled gradients, tells the loss
    scale of overflows and calls the step, or not. In the others every gradient is averaged after the last block.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 64.0
    steps = 0
    for step in range(4):
        for position in range(2):
            value = (step + 1.0) * (rank + 1) * (position + 1)
            if (step, rank, position) == overflow_at:
                value = INFINITE
            loss = model(torch.full((1, 4), value)).sum()
            with amp.scale_loss(loss, optimizer, delay_overflow_check=way == "delayed") as scaled_loss:
                scaled_loss.backward()
        if way == "delayed":
            steps += reduce_and_step(model, optimizer, scaler)
            continue
        for parameter in amp.master_params(optimizer):
            flat_dist_call([parameter.grad.data], dist.all_reduce)
        if way == "clipped":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.0**20)
        optimizer.step()
        steps += optimizer.last_step.applied
        model.zero_grad()
    return {"weight": model.state_dict()["weight"].tolist(), "steps": steps, "amp": amp.state_dict()}


def train_unequal(rank, way):
    """Every process has its own seed, as a script has that relies on the broadcast of DistributedDataParallel."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 64.0
    if way == "by hand":
        flat_dist_call([parameter.data for parameter in model.parameters()], dist.broadcast, (0,))
        parallel = nn.parallel.DistributedDataParallel(model, init_sync=False)
    else:
        parallel = {"torch": nn.parallel.DistributedDataParallel, "apex": ApexParallel}[way](model)
    before = [parameter.tolist() for parameter in model.parameters()]
    for step in (1.0, 2.0):
        optimizer.zero_grad()
        with amp.scale_loss(parallel(torch.full((1, 4), step * (rank + 1))).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return {"before": before, **{name: value.tolist() for name, value in model.state_dict().items()}}


def reduce_and_step(model, optimizer, scaler):
    gradients = [parameter.grad for parameter in amp.master_params(optimizer) if parameter.grad is not None]
    flat = torch.empty(sum(gradient.numel() for gradient in gradients))
    views = apex_c.unflatten(flat, gradients)
    overflow_buf = torch.zeros(1, dtype=torch.int)
    amp_c.multi_tensor_scale(65536, overflow_buf, [gradients, views], scaler.loss_scale() / dist.get_world_size())
    dist.all_reduce(flat)
    overflow_buf.zero_()
    amp_c.multi_tensor_scale(65536, overflow_buf, [views, gradients], 1.0 / scaler.loss_scale())
    own_buf, scaler._overflow_buf = scaler._overflow_buf, overflow_buf
    overflowed = scaler.update_scale()
    scaler._overflow_buf = own_buf
    if not overflowed:
        optimizer.step()
    elif amp._amp_state.opt_properties.master_weights:
        for master in optimizer._amp_stash.all_fp32_from_fp16_params:
            master.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    return not overflowed


def main(rank, folder):
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", PrecisionWarning)  # some CPUs compute float16 in software
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    result = {
        f"{opt_level} {wrap.__module__.partition('.')[0]} {overflow_at}": train(rank, opt_level, wrap, overflow_at)
        for opt_level in ("O1", "O2")
        for wrap in (nn.parallel.DistributedDataParallel, ApexParallel)
        for overflow_at in (None, (1, 1, 0))
    }
    for way in ("delayed", "averaged", "clipped"):
        for opt_level in ("O1", "O2"):
            for overflow_at in (None, (1, 1, 1)):
                result[f"{opt_level} {way} {overflow_at}"] = train_by_hand(rank, opt_level, way, overflow_at)
    result.update({f"unequal {way}": train_unequal(rank, way) for way in ("torch", "apex", "by hand")})
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
