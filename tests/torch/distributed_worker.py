"""One of two gloo processes: runs every scenario and writes what it saw, for test_distributed.py to judge."""

import contextlib
import functools
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ampx

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def session():
    return ampx.init("torch", dtype="float32", loss_scale=ampx.LossScale(growth_interval=2))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))


def backward(loss, opt, **options):
    with ampx.scale_loss(loss, opt, **options) as scaled:
        scaled.backward()


def batch(step, rank=None):
    """The global batch of a step, or one rank's half of it."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


def plain(tensor):
    whole = getattr(tensor, "full_tensor", None)
    return tensor.detach() if whole is None else whole().detach()


def flat(model):
    return torch.cat([plain(p).reshape(-1) for p in model.parameters()]).tolist()


def told(opt):
    """What a step did, in JSON."""
    step = opt.last_step
    return [step.applied, step.scale, step.next_scale, step.grad_norm]


def train(model, opt, rank, bad_steps, forward=None, steps=4, after_backward=None):
    """Train on this rank's halves; on bad steps rank 0's loss is infinite."""
    seen = []
    for step in range(steps):
        before = flat(model)
        loss = (forward or model)(batch(step, rank)).pow(2).mean()
        backward(loss * math.inf if step in bad_steps and rank == 0 and after_backward is None else loss, opt)
        if after_backward is not None and step in bad_steps:
            after_backward()
        opt.step()
        seen.append([*told(opt), flat(model) == before])
        opt.zero_grad()
    return {"steps": seen, "weights": flat(model)}


@contextlib.contextmanager
def count_all_reduces():
    calls, original = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield calls
    finally:
        dist.all_reduce = original


# -- DDP -----------------------------------------------------------------------------------------------


@scenario
def ddp_overflow_on_one_rank(rank):
    session()
    model = make_model()
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with count_all_reduces() as calls:
        result = train(model, opt, rank, {1}, DistributedDataParallel(model))
    return {**result, "flag_reductions": calls}


@scenario
def ddp_with_zero(rank):
    """Each process updates its part of the weights."""
    session()
    model = make_model()
    opt = ampx.wrap_optimizer(ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1))
    return train(model, opt, rank, {1}, DistributedDataParallel(model))


@scenario
def ddp_in_bfloat16(rank):
    ampx.init("torch", dtype="bfloat16", loss_scale=ampx.LossScale(growth_interval=2))
    model = make_model()
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return train(model, opt, rank, {1}, DistributedDataParallel(model))


@scenario
def ddp_asked_to_reduce_the_flag(rank):
    session()
    model = make_model()
    raw = torch.optim.Adam(model.parameters(), lr=0.1)
    opt = ampx.wrap_optimizer(raw, process_group=dist.group.WORLD)
    with count_all_reduces() as calls:
        result = train(model, opt, rank, {1}, DistributedDataParallel(model))
    return {**result, "flag_reductions": calls}


@scenario
def ddp_accumulates(rank):
    """Two micro-batches a step, the first one unsynchronised; in step 1 rank 0 overflows in the first."""
    session()
    model = make_model()
    ddp = DistributedDataParallel(model)
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for step in range(3):
        before = flat(model)
        first, second = batch(step, rank)
        with ddp.no_sync():
            loss = ddp(first[None]).pow(2).mean() / 2
            backward(loss * math.inf if step == 1 and rank == 0 else loss, opt)
        backward(ddp(second[None]).pow(2).mean() / 2, opt)
        opt.step()
        seen.append([*told(opt), flat(model) == before])
        opt.zero_grad()
    return {"steps": seen, "weights": flat(model)}


@scenario
def masters_of_ranks_that_start_unequal(rank):
    """Every rank has its own seed: DistributedDataParallel, or the script, gives all of them rank 0's weights."""
    weights = {}
    for way in ("parallel", "by hand", "loaded"):
        amp = ampx.init("torch", dtype="bfloat16", level="O2", loss_scale=1024.0)
        torch.manual_seed(rank)
        model = nn.Linear(4, 2, bias=False)
        model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        opt = amp.wrap_optimizer(raw)
        if way == "loaded":
            model.load_state_dict({"weight": torch.randn(2, 4, generator=torch.Generator().manual_seed(7))})
        if way == "by hand":
            dist.broadcast(model.weight.data, 0)
            parallel = DistributedDataParallel(model, init_sync=False)
        else:
            parallel = DistributedDataParallel(model)
        for step in (1.0, 2.0):
            backward(parallel(torch.full((1, 4), step * (rank + 1))).sum(), opt)
            opt.step()
            opt.zero_grad()
        weights[way] = model.state_dict()["weight"].tolist()
        ampx.shutdown()
    return weights


def _losses_by_id(rank, as_view):
    """Two losses with scales of their own; in step 1 the second one overflows on rank 0."""
    amp = session()
    model = make_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        backward(ddp(batch(step, rank)).pow(2).mean(), opt, loss_id=0)
        loss = ddp(batch(100 + step, rank)).pow(2).mean()
        backward(loss * math.inf if step == 1 and rank == 0 else loss, opt, loss_id=1)
        opt.step()
        opt.zero_grad()
    (losses,) = [group["losses"] for group in amp.state_dict()["groups"]]
    return {"scales": [loss["scale"] for loss in losses], "weights": flat(model)}


SCENARIOS["ddp_losses_by_id"] = functools.partial(_losses_by_id, as_view=False)
SCENARIOS["ddp_losses_by_id_in_bucket_views"] = functools.partial(_losses_by_id, as_view=True)


# -- gradients that differ between the ranks -----------------------------------------------------------


def _unsynchronised(rank, grouped=False, **options):
    session()
    if grouped:
        options["process_group"] = dist.group.WORLD
    model = make_model()
    ddp = DistributedDataParallel(model)
    opt = ampx.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.1, fused=True), **options)
    with ddp.no_sync(), count_all_reduces() as calls:
        result = train(model, opt, rank, {1}, ddp)
    return {**result, "flag_reductions": calls}


SCENARIOS["no_sync_without_a_group"] = _unsynchronised
SCENARIOS["no_sync_with_a_group"] = functools.partial(_unsynchronised, grouped=True)
SCENARIOS["no_sync_with_a_group_scale_on_device"] = functools.partial(_unsynchronised, grouped=True, device_scale=True)


@scenario
def no_sync_natively(rank):
    model = make_model()
    ddp = DistributedDataParallel(model)
    opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with ddp.no_sync():
        loss = ddp(batch(0, rank)).pow(2).mean()
        scaler.scale(loss * math.inf if rank == 0 else loss).backward()
    scaler.step(opt)
    scaler.update()
    return {"scale": scaler.get_scale()}


@scenario
def a_rank_without_gradients(rank):
    """In steps 1 and 2 rank 1's loss does not reach the optimizer's parameters; in step 2 rank 0 overflows."""
    session()
    model, elsewhere = make_model(), nn.Parameter(torch.ones(()))
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_group=dist.group.WORLD)
    scales = []
    for step in range(4):
        loss = model(batch(step, rank)).pow(2).mean() if rank == 0 or step in (0, 3) else elsewhere.square()
        backward(loss * math.inf if step == 2 and rank == 0 else loss, opt)
        opt.step()
        opt.zero_grad()
        scales.append(opt.loss_scale)
    return {"scales": scales}


# -- sharded parameters --------------------------------------------------------------------------------


def _sharded(rank, fused, **options):
    """Overflows in rank 0's shard of a gradient only, on step 1."""
    session()
    model = make_model()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    raw = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    opt = ampx.wrap_optimizer(raw, max_grad_norm=0.5, **options)

    def spoil():
        if rank == 0:
            model[0].weight.grad.to_local().view(-1)[0] = math.inf

    with count_all_reduces() as calls:
        result = train(model, opt, rank, {1}, after_backward=spoil)
    return {**result, "flag_reductions": calls}


SCENARIOS["fsdp2"] = functools.partial(_sharded, fused=False)
SCENARIOS["fsdp2_fused"] = functools.partial(_sharded, fused=True)
SCENARIOS["fsdp2_fused_scale_on_device"] = functools.partial(_sharded, fused=True, device_scale=True)


def _sharded_in_float16(rank, casts_by):
    """Rank 0's loss is infinite on step 1; an average of the shards and a scheduler wait for the steps."""
    scale = ampx.LossScale(init_scale=1024.0, growth_interval=2)
    own = casts_by == "ampx"
    policy = MixedPrecisionPolicy() if own else MixedPrecisionPolicy(torch.float16, reduce_dtype=torch.float32)
    ampx.init("torch", dtype="float16", device="cpu", process_wide=own, loss_scale=scale, nan_loss="skip")
    model = make_model()
    dtypes = set()
    model[1].register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    shards = [p.detach().clone() for p in model.parameters()]
    average = torch.optim.swa_utils.AveragedModel(
        nn.ParameterList(shards), avg_fn=lambda old, new, count: (old + new) / 2
    )
    gates = (ampx.gate(average, opt), ampx.gate(torch.optim.lr_scheduler.StepLR(opt, 1, 0.5), opt))

    seen = []
    for step in range(4):
        before = flat(model)
        loss = model(batch(step, rank)).float().pow(2).mean()
        backward(loss * math.inf if step == 1 and rank == 0 else loss, opt)
        opt.step()
        opt.zero_grad()
        gates[0].update_parameters(nn.ParameterList(model.parameters()))
        gates[1].step()
        seen.append([*told(opt), flat(model) == before])
    result = {"steps": seen, "weights": flat(model)}
    whole = torch.cat([plain(p).reshape(-1) for p in average.module.parameters()]).tolist()
    return {**result, "dtypes": sorted(dtypes), "average": whole, "rate": opt.param_groups[0]["lr"]}


SCENARIOS["fsdp2_in_float16"] = functools.partial(_sharded_in_float16, casts_by="ampx")
SCENARIOS["fsdp2_in_float16_by_its_policy"] = functools.partial(_sharded_in_float16, casts_by="torch")


@scenario
def fsdp2_names_the_parameter_in_the_shard(rank):
    session()
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model(batch(0, rank)).pow(2).mean(), opt)
    if rank == 0:
        model[0].weight.grad.to_local().view(-1)[0] = math.inf
    # A plain tensor: with a DTensor, the one process that looks would wait for the others.
    norm = ampx.clip_grad_norm(opt, 1.0)
    opt.step()
    named = [[entry.name, entry.nonfinite] for entry in ampx.debug.nonfinite_parameters(opt, model)]
    return {"found": named, "norm": [type(norm).__name__, norm.item()]}


@scenario
def fsdp1_with_a_group(rank):
    session()
    model = FullyShardedDataParallel(make_model(), use_orig_params=False, device_id=torch.device("cpu"))
    opt = ampx.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.1), process_group=dist.group.WORLD)
    (shard,) = model.parameters()
    seen = []
    for step in range(4):
        before = shard.detach().clone()
        backward(model(batch(step, rank)).pow(2).mean(), opt)
        if step == 1 and rank == 0:
            shard.grad.view(-1)[0] = math.inf
        ampx.unscale(opt)
        norm = model.clip_grad_norm_(0.5).item()
        opt.step()
        seen.append([*told(opt)[:3], norm, torch.equal(before, shard)])
        opt.zero_grad()
    return {"steps": seen}


def main(rank, folder):
    torch.set_num_threads(1)
    for name, function in SCENARIOS.items():
        dist.init_process_group("gloo", f"file://{folder}/{name}.store", timedelta(seconds=20), rank=rank, world_size=2)
        try:
            result = function(rank)
        except Exception:  # the other scenarios still count
            result = {"error": traceback.format_exc()}
        ampx.shutdown()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        (folder / f"{name}.{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
