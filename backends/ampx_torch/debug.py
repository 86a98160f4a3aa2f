"""Where a non-finite value comes from: parameters by their gradients."""

from __future__ import annotations

from typing import Any

import torch

from ampx import modules
from ampx.backend import Array
from ampx.formats import stride

from .casting.module_rules import plain_name
from .trees import gradient_of, stored


def _count_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(stored(tensor))).sum()


def nonfinite_parameters(optimizer: Any, model: torch.nn.Module | None) -> list[tuple[str, int, int]]:
    """List (name, non-finite elements, elements) of a wrapped optimizer's parameters with non-finite gradients.

    Of sharded gradients (FSDP2) every process lists what its own shard holds.

    Sync: one a device.
    """
    named = [
        (name, gradient)
        for name, parameter in name_parameters(optimizer.param_groups, model, optimizer.masters)
        if (gradient := gradient_of(parameter)) is not None
    ]
    counts: dict[torch.device, list[torch.Tensor]] = {}
    for _, gradient in named:
        counts.setdefault(gradient.device, []).append(_count_nonfinite(gradient))
    read = {device: iter(torch.stack(tensors).tolist()) for device, tensors in counts.items()}
    listed = [(name, next(read[gradient.device]), gradient.numel()) for name, gradient in named]
    return [entry for entry in listed if entry[1]]


def sample_gradients(optimizer: Any, samples: int) -> list[tuple[str, tuple[int, ...], Array | None]]:
    """Return name, shape and a sample of the gradient as it is now, of a wrapped optimizer's parameters.

    Sync: one a gradient.
    """
    named = name_parameters(optimizer.param_groups, None, optimizer.masters)
    return [(name, tuple(parameter.shape), _sample(gradient_of(parameter), samples)) for name, parameter in named]


def _sample(gradient: torch.Tensor | None, samples: int) -> Any:
    if gradient is None or gradient.layout is not torch.strided:
        return None
    values = stored(gradient).reshape(-1)
    return values[:: stride(values.numel(), samples)].float().cpu().numpy()


def name_parameters(
    groups: list[dict[str, Any]], model: torch.nn.Module | None, masters: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Pair an optimizer's parameters with names: the model's, the optimizer's own, a living module's, or positions."""
    names = _names_by_id(groups, model, [] if masters is None else masters.pairs)
    named = []
    for group_index, group in enumerate(groups):
        own_names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            own_name, in_module = own_names[index] if own_names else None, names.get(id(parameter))
            name = in_module or own_name if model is not None else own_name or in_module
            position = f"param_groups[{group_index}]['params'][{index}] {tuple(parameter.shape)}"
            named.append((name or position, parameter))
    return named


def _names_by_id(groups: list[dict[str, Any]], model: torch.nn.Module | None, pairs: list[Any]) -> dict[int, str]:
    """Return the names of parameters and masters in the model or, where the optimizer has none, in living modules."""
    names: dict[int, str] = {}
    if model is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    elif not all("param_names" in group for group in groups):
        parameters = [*(p for group in groups for p in group["params"]), *(own for own, _ in pairs)]
        names = modules.name_parameters(parameters, torch.nn.Module, "_modules", plain_name)
    return names | {id(master): names[id(own)] for own, master in pairs if id(own) in names}
