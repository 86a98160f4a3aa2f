"""What `initialize` accepts: models and optimizers, one, lists of them, or lists of lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ampx.errors import InvalidOptionError, ProtocolError
from ampx.optimizer import WrappedOptimizer
from ampx_torch.prepare.masters import check_movable
from ampx_torch.trees import LOW

from .errors import ArgumentTypeError, InitializedTwiceError, PropertyError


def flatten(tree: Any) -> list[Any]:
    """Return the items of a list, tuple or dict, however deep; a single item is a list of one."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, (list, tuple)):
        return [tree]
    return [item for own in tree for item in flatten(own)]


def check_models(models: Sequence[Any], takes_low: bool) -> None:
    """Refuse what is no module, is wrapped for several processes, or holds low precision unwelcomely."""
    for model in models:
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(
                f"initialize got {type(model).__name__} as a model; accepted: nn.Module, or a list of them. Pass that."
            )
        parallel = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        if parallel or type(model).__name__ == "DistributedDataParallel":
            raise ProtocolError(
                f"initialize got a model wrapped by {type(model).__module__}.{type(model).__name__}; accepted: the "
                f"bare model, because the wrapper has made its buffers for the parameters' present dtype. Call "
                f"amp.initialize first and wrap what it returns."
            )
        named = [*model.named_parameters(), *model.named_buffers()]
        low = next(((name, tensor.dtype) for name, tensor in named if tensor.dtype in LOW), None)
        if low is not None and not takes_low:
            raise PropertyError(
                f"initialize got a model whose {low[0]} is {low[1]}; accepted: a model in float32, at every opt level. "
                f"Remove .half() or .bfloat16(); initialize casts the model where the level says so."
            )


def check_optimizers(optimizers: Sequence[Any], masters: bool) -> None:
    """Refuse what is no optimizer, was wrapped before, or cannot get the masters that it is to get."""
    for position, optimizer in enumerate(optimizers):
        if isinstance(optimizer, WrappedOptimizer) or any(optimizer is other for other in optimizers[:position]):
            raise InitializedTwiceError(
                f"initialize got an optimizer ({type(optimizer).__name__}) that it had before; its gradients would be "
                f"unscaled twice. Pass each optimizer once."
            )
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise PropertyError(
                "initialize got an FP16_Optimizer, which has master weights of its own; accepted: the optimizer in it. "
                "Pass that, and use opt_level='O2' for master weights."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"initialize got {type(optimizer).__name__} as an optimizer; accepted: torch optimizers, or a list of "
                f"them. Pass that."
            )
        if masters:
            check_movable(optimizer)


def check_losses(count: Any) -> None:
    """Refuse what is no number of losses."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidOptionError(f"num_losses={count!r} is not accepted; accepted: an integer from 1. Change it.")


def device_of(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the kind of device that the models' parameters are on: `"cuda"` if any is."""
    tensors = [parameter for model in models for parameter in model.parameters()]
    tensors += [
        parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    return "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"
