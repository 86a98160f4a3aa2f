"""Where a non-finite value comes from: parameters by their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .numerics.reductions import stored


def _count_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(stored(tensor))).sum()


def nonfinite_parameters(optimizer: Any, model: torch.nn.Module | None) -> list[tuple[str, int, int]]:
    """List (name, non-finite elements, elements) of a wrapped optimizer's parameters with non-finite gradients.

    Of sharded gradients (FSDP2) every process lists what its own shard holds.

    Sync: one a device.
    """
    named = [
        (name, parameter.grad)
        for name, parameter in name_parameters(optimizer.param_groups, model, optimizer.masters)
        if parameter.grad is not None
    ]
    counts: dict[torch.device, list[torch.Tensor]] = {}
    for _, gradient in named:
        counts.setdefault(gradient.device, []).append(_count_nonfinite(gradient))
    read = {device: iter(torch.stack(tensors).tolist()) for device, tensors in counts.items()}
    listed = [(name, next(read[gradient.device]), gradient.numel()) for name, gradient in named]
    return [entry for entry in listed if entry[1]]


def name_parameters(
    groups: list[dict[str, Any]], model: torch.nn.Module | None, masters: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Pair the parameters of an optimizer with names: the model's, the optimizer's own, or positions."""
    names: dict[int, str] = {}
    if model is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if masters is not None:
            names |= {id(master): names[id(own)] for own, master in masters.pairs if id(own) in names}
    named = []
    for group_index, group in enumerate(groups):
        own_names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            position = f"param_groups[{group_index}]['params'][{index}] {tuple(parameter.shape)}"
            name = names.get(id(parameter)) or (own_names[index] if own_names else position)
            named.append((name, parameter))
    return named
