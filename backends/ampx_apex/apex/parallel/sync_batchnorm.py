"""Batch norm whose statistics are those of the batches of all processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ampx.errors import InvalidOptionError, ProtocolError


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of the processes' gradients."""

    @staticmethod
    def forward(context: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total, None


class SyncBatchNorm(_BatchNorm):
    """torch's SyncBatchNorm on CUDA devices, and the same on the CPU, where torch refuses.

    It is no subclass of torch's: torch's DistributedDataParallel refuses those on the CPU. `channel_last` says that the
    channels are the last dimension of the input, `fuse_relu` that the result goes through ReLU.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels: Any = nn.SyncBatchNorm._check_non_zero_input_channels
    _normalise_by_torch: Any = nn.SyncBatchNorm.forward

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise, add `z`, go through ReLU where asked for. Sync: on CUDA as torch's."""
        x = input.movedim(-1, 1) if self.channel_last else input
        y = self._normalise_on_cpu(x) if self._is_shared_on_cpu(x) else self._normalise_by_torch(x)
        y = y.movedim(1, -1) if self.channel_last else y
        if z is not None:
            y = y + z
        return functional.relu(y) if self.fuse_relu else y

    def _is_shared_on_cpu(self, x: torch.Tensor) -> bool:
        uses_batch = self.training or self.running_mean is None
        return x.device.type == "cpu" and uses_batch and self.training and dist.is_available() and dist.is_initialized()

    def _normalise_on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the statistics by collectives that gradients flow through: one for the mean, one for the variance."""
        self._check_input_dim(x)
        self._check_non_zero_input_channels(x)
        group = dist.group.WORLD if self.process_group is None else self.process_group
        work = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = work.new_tensor([x.numel() // x.size(1)])
        sums = _Sum.apply(torch.cat([work.sum(dims), count]), group)
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = work - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(dims), group) / total
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.to(y.dtype).view(shape) + self.bias.to(y.dtype).view(shape)
        return y.to(x.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        seen, running_mean, running_variance = self.num_batches_tracked, self.running_mean, self.running_var
        if seen is None or running_mean is None or running_variance is None:
            return
        seen.add_(1)
        share = 1 / seen.item() if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(running_mean.dtype), share)
        running_variance.lerp_(variance.to(running_variance.dtype), share)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return the network with SyncBatchNorm in place of its batch norms, with their parameters and statistics."""
    new = module
    if isinstance(module, _BatchNorm):
        own: Any = module
        new = SyncBatchNorm(
            own.num_features, own.eps, own.momentum, own.affine, own.track_running_stats, process_group, channel_last
        )
        # The very parameters, so that an optimizer made before still holds them.
        new._parameters, new._buffers = own._parameters, own._buffers
        new.train(own.training)
    for name, child in module.named_children():
        new.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return new


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this process's group of neighbours that share the statistics of SyncBatchNorm; None, for size 0, for all.

    Raises:
        ProtocolError: There is no process group.
        InvalidOptionError: The number of processes is not a multiple of `group_size`.

    Sync: all processes call it together.
    """
    if group_size == 0:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ProtocolError(
            "create_syncbn_process_group was called without a process group; accepted: after "
            "torch.distributed.init_process_group(...). Call that first."
        )
    world = dist.get_world_size()
    if group_size < 0 or world % group_size:
        raise InvalidOptionError(
            f"create_syncbn_process_group({group_size}) does not fit {world} processes; accepted: 0, or a divisor of "
            f"{world}. Change it."
        )
    mine = None
    for first in range(0, world, group_size):
        members = list(range(first, first + group_size))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    return mine
