"""Where a non-finite value comes from: parameters by their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        for name, parameter in name_parameters(optimizer.param_groups, model, [optimizer.masters])
        if (gradient := gradient_of(parameter)) is not None
    ]
    counts: dict[torch.device, list[torch.Tensor]] = {}
    for _, gradient in named:
        counts.setdefault(gradient.device, []).append(_count_nonfinite(gradient))
    read = {device: iter(torch.stack(tensors).tolist()) for device, tensors in counts.items()}
    listed = [(name, next(read[gradient.device]), gradient.numel()) for name, gradient in named]
    return [entry for entry in listed if entry[1]]


def names_in_models(optimizers: Iterable[Any]) -> dict[int, str]:
    """Return, by id, a name for each parameter of several wrapped optimizers that no other one of them has."""
    every = list(optimizers)
    groups = [group for optimizer in every for group in optimizer.param_groups]
    return modules.distinct_names(name_parameters(groups, None, [optimizer.masters for optimizer in every]))


def sample_parameters(
    optimizer: Any, samples: int, names: Mapping[int, str]
) -> list[tuple[str, tuple[int, ...], Array | None, Array | None]]:
    """Return name, shape and samples, as they are now, of a wrapped optimizer's parameters.

    These are of the gradient, None for a sparse one, and of the parameter, None where it is not float32.

    Args:
        optimizer: The wrapper.
        samples: So many elements at most.
        names: As `names_in_models` returns them.

    Sync: two a parameter.
    """
    rows = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        weights = parameter if parameter.dtype is torch.float32 else None
        sampled = (_sample(tensor, samples) for tensor in (gradient_of(parameter), weights))
        rows.append((names[id(parameter)], tuple(parameter.shape), *sampled))
    return rows


def _sample(tensor: torch.Tensor | None, samples: int) -> Any:
    if tensor is None or tensor.layout is not torch.strided:
        return None
    values = stored(tensor).reshape(-1)
    return values[:: stride(values.numel(), samples)].float().cpu().numpy().copy()  # the tensor's own memory, otherwise


def name_parameters(
    groups: list[dict[str, Any]], model: torch.nn.Module | None, masters: Sequence[Any] = ()
) -> list[tuple[str, torch.Tensor]]:
    """Pair the parameters of groups with names: the model's, the groups' own, a living module's, or positions.

    Args:
        groups: Of one or more optimizers.
        model: The model, where it is known.
        masters: Of each optimizer; None for an optimizer without.
    """
    names = _names_by_id(groups, model, [pair for own in masters if own is not None for pair in own.pairs])
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
