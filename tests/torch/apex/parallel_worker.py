"""One of two gloo processes: runs every scenario and writes what it saw, for test_parallel.py to judge."""

import json
import pathlib
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ampx.errors import AmpxWarning, InvalidOptionError
from ampx_torch.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def batch(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def half_of(whole, rank):
    return whole[:3] if rank == 0 else whole[3:]


def network(rank, dtype=torch.float32):
    torch.manual_seed(rank)  # rank 0's weights must win
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)


def gradients(module):
    return {
        name: None if parameter.grad is None else parameter.grad.tolist()
        for name, parameter in module.named_parameters()
    }


def mean_gradients(rank, dtype=torch.float32, steps=2, **options):
    own = network(rank, dtype)
    model = DistributedDataParallel(own, **options)
    for step in range(steps):
        own.zero_grad()
        model(half_of(batch(step), rank).to(dtype)).float().square().sum().backward()
    return gradients(own)


@scenario
def averages(rank):
    return mean_gradients(rank)


@scenario
def averages_in_small_messages(rank):
    return mean_gradients(rank, message_size=3)


@scenario
def averages_after_the_backward(rank):
    return mean_gradients(rank, delay_allreduce=True)


@scenario
def sums(rank):
    return mean_gradients(rank, gradient_average=False)


@scenario
def sums_divided_before(rank):
    return mean_gradients(rank, gradient_average=False, gradient_predivide_factor=4.0)


@scenario
def averages_divided_before(rank):
    return mean_gradients(rank, gradient_predivide_factor=4.0)


@scenario
def averages_of_float16_in_float32(rank):
    """Two gradients of 60000 whose sum is no float16."""
    own = nn.Linear(1, 1, bias=False).half()
    model = DistributedDataParallel(own, allreduce_always_fp32=True)
    (model(torch.ones(1, 1, dtype=torch.float16)).float() * 6e4).sum().backward()
    return own.weight.grad.float().item()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(4, 1, bias=False) for _ in range(3))

    def forward(self, x, everything):
        return self.used(x) + self.sometimes(x) if everything else self.used(x)


@scenario
def unused_parameters(rank):
    own = Branches()
    model, result = DistributedDataParallel(own), []
    for everything in (True, False, True):
        own.zero_grad()
        model(batch(), everything).sum().backward()
        result.append([model.weight.grad is not None for model in (own.used, own.sometimes, own.never)])
    return result


@scenario
def gradients_of_its_own(rank):
    own = network(rank)
    model, result = DistributedDataParallel(own), []
    model.disable_allreduce()
    model(half_of(batch(0), rank)).square().sum().backward()
    result.append(own[2].bias.grad.tolist())
    model.enable_allreduce()
    model(half_of(batch(1), rank)).square().sum().backward()
    return [*result, own[2].bias.grad.tolist()]


@scenario
def statistics_of_its_own(rank):
    norm = nn.BatchNorm1d(4)
    model = DistributedDataParallel(norm)
    for step in range(2):
        model(half_of(batch(step), rank)).sum().backward()
    return norm.running_mean.tolist()


@scenario
def a_loop_of_two_networks(rank):
    """A GAN's discriminator: two forwards and backwards, its batch norms in training, a third one for the other."""
    torch.manual_seed(0)
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for step in range(2):
        x = half_of(batch(step), rank)
        fake = maker(x)
        critic(x).sum().backward()
        critic(fake.detach()).square().sum().backward()
        critic.zero_grad()
        critic(fake).sum().backward()
    return [gradients(maker), gradients(critic)]


@scenario
def options_that_warn(rank):
    result = {}
    own = nn.Linear(2, 2)
    group = dist.new_group()
    for name, value in {
        "allreduce_trigger_params": list(own.parameters()),
        "num_allreduce_streams": 2,
        "prof": True,
        "gradient_average_split_factor": 2.0,
        "allreduce_communicators": ([group], [None]),
    }.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AmpxWarning)
            DistributedDataParallel(own, **{name: value})
        result[name] = [str(warning.message) for warning in caught if issubclass(warning.category, AmpxWarning)]
    return result


@scenario
def options_that_raise(rank):
    result = {}
    own = nn.Linear(2, 2)
    for name, options in {
        "shared_param": {"shared_param": True},
        "retain": {"retain_allreduce_buffers": True},
        "triggers": {"delay_allreduce": True, "allreduce_trigger_params": []},
        "streams": {"delay_allreduce": True, "num_allreduce_streams": 2},
        "factor": {"gradient_predivide_factor": 0.0},
    }.items():
        try:
            DistributedDataParallel(own, **options)
        except Exception as error:
            result[name] = [type(error).__name__, str(error)]
    return result


@scenario
def reducer_of_a_module(rank):
    own = network(rank)
    reducer = Reducer(own)
    own[0].weight.grad = torch.full((4, 4), 1.0 + rank)
    reducer.reduce()
    return [own[0].weight.tolist(), own[0].weight.grad.tolist(), own[0].bias.grad]


@scenario
def reducer_of_gradients(rank):
    result = [torch.full((2,), 1.0 + rank), torch.full((1,), 4.0 * rank, dtype=torch.float64)]
    Reducer(result).reduce()
    return [item.tolist() for item in result]


def run_norm(norm, x, z=None):
    """Two training passes and one in evaluation; gives results, gradients and statistics."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        y = norm(x, z) if z is not None else norm(x)
        weights = torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin()
        (y * weights).sum().backward()
    statistics = None if norm.running_mean is None else [norm.running_mean.tolist(), norm.running_var.tolist()]
    affine = [norm.weight.grad.tolist(), norm.bias.grad.tolist()] if norm.affine else None
    norm.eval()
    return {
        "y": y.tolist(), "dtype": str(y.dtype), "x.grad": x.grad.tolist(), "statistics": statistics, "affine": affine,
        "evaluated": norm(x).tolist(),
    }  # fmt: skip


def norm_input():
    return torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(5)) * 2 + 100


@scenario
def sync_norm(rank):
    return run_norm(SyncBatchNorm(3), half_of(norm_input(), rank))


@scenario
def sync_norm_without_momentum(rank):
    return run_norm(SyncBatchNorm(3, momentum=None, affine=False), half_of(norm_input(), rank))


@scenario
def sync_norm_without_statistics(rank):
    return run_norm(SyncBatchNorm(3, track_running_stats=False), half_of(norm_input(), rank))


@scenario
def sync_norm_of_bfloat16(rank):
    return run_norm(SyncBatchNorm(3), half_of(norm_input() - 100, rank).bfloat16())


@scenario
def sync_norm_channel_last(rank):
    norm = SyncBatchNorm(3, channel_last=True, fuse_relu=True)
    x = half_of(norm_input(), rank).movedim(1, -1).contiguous()
    return run_norm(norm, x, torch.full_like(x, 0.25))


@scenario
def converted_network(rank):
    model = nn.Sequential(nn.BatchNorm1d(3, eps=1e-3), nn.Sequential(nn.BatchNorm2d(5, affine=False)), nn.LayerNorm(3))
    nn.init.constant_(model[0].weight, 7.0)
    model[0].running_mean.fill_(3.0)
    before = list(model.parameters())
    new = convert_syncbn_model(model, channel_last=True)
    return {
        "kinds": [type(item).__name__ for item in (new[0], new[1][0], new[2])],
        "same": all(own is other for own, other in zip(new.parameters(), before, strict=True)),
        "kept": [new[0].eps, new[0].weight.tolist(), new[0].running_mean.tolist(), new[1][0].affine],
        "channel_last": new[0].channel_last,
        "alone": type(convert_syncbn_model(nn.BatchNorm1d(2))).__name__,
    }


@scenario
def converted_network_in_parallel(rank):
    """Both kinds of DistributedDataParallel take it, and its gradients are those of the whole batch."""
    result = []
    for wrap in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        own = convert_syncbn_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        model = wrap(own)
        model(half_of(batch(), rank)).square().sum().backward()
        result.append(gradients(own))
    return result


@scenario
def groups_of_one(rank):
    group = create_syncbn_process_group(1)
    own = run_norm(SyncBatchNorm(3, process_group=group), half_of(norm_input(), rank))
    plain = run_norm(nn.BatchNorm1d(3), half_of(norm_input(), rank))
    try:
        create_syncbn_process_group(3)
        error = None
    except InvalidOptionError as raised:
        error = str(raised)
    return {"own": own, "plain": plain, "all": create_syncbn_process_group(0), "error": error}


def main(rank, folder):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for name, function in SCENARIOS.items():
        try:
            record = {"value": function(rank)}
        except Exception:
            record = {"error": traceback.format_exc()}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
