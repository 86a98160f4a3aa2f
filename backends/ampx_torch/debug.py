"""Where a non-finite value comes from: parameters by their gradients, modules by their outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Overflow:
    """A module whose output is not finite.

    Attributes:
        module: Name of the module in the model; "" for the model itself.
        kind: Its class.
        dtype: Dtype of the output.
        nonfinite: How many elements of the output are inf or NaN.
        elements: How many elements it has.
        inputs_finite: False: the module only passed on what it received.
        largest_input: Largest finite absolute value among the inputs.
    """

    module: str
    kind: str
    dtype: str
    nonfinite: int
    elements: int
    inputs_finite: bool
    largest_input: float


class OverflowTrace:
    """What `trace_overflow` found.

    Attributes:
        first: The first module whose output was not finite, in order of execution; None while there is none.
    """

    def __init__(self) -> None:
        """Start with nothing found."""
        self.first: Overflow | None = None

    def __str__(self) -> str:
        """Tell it in one sentence."""
        found = self.first
        if found is None:
            return "no module's output overflowed"
        origin = "its inputs were finite" if found.inputs_finite else "its inputs were not finite either"
        return (
            f"{found.module or '(the model)'} ({found.kind}): {found.nonfinite} of {found.elements} outputs in "
            f"{found.dtype} are not finite; {origin}, the largest finite one being {found.largest_input:g}"
        )


@contextmanager
def trace_overflow(model: torch.nn.Module) -> Iterator[OverflowTrace]:
    """Watch the outputs of all modules until the first that is not finite.

    Sync: one a module call, until something is found.
    """
    trace = OverflowTrace()
    names = {module: name for name, module in model.named_modules()}

    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if trace.first is not None:
            return
        for tensor in _floating(output):
            nonfinite = int((~torch.isfinite(tensor)).sum())
            if nonfinite:
                tensors = list(_floating(inputs))
                finite = all(bool(torch.isfinite(one).all()) for one in tensors)
                largest = max((_largest(one) for one in tensors), default=0.0)
                trace.first = Overflow(
                    names[module],
                    type(module).__name__,
                    str(tensor.dtype).rpartition(".")[2],
                    nonfinite,
                    tensor.numel(),
                    finite,
                    largest,
                )
                return

    handles = [module.register_forward_hook(look) for module in names]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _floating(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point() or tree.is_complex():
            yield tree.detach()
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _floating(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _floating(value)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def nonfinite_parameters(optimizer: Any, model: torch.nn.Module | None) -> list[tuple[str, int, int]]:
    """List (name, non-finite elements, elements) of the parameters with non-finite gradients.

    Args:
        optimizer: The wrapped optimizer.
        model: Where names come from; else those the optimizer was made with, else positions.

    Sync: one.
    """
    named = [
        (name, parameter.grad)
        for name, parameter in name_parameters(optimizer.param_groups, model, optimizer.masters)
        if parameter.grad is not None
    ]
    if not named:
        return []
    counts = torch.stack([_count_nonfinite(gradient).to("cpu", non_blocking=True) for _, gradient in named])
    if any(gradient.is_cuda for _, gradient in named):
        torch.cuda.synchronize()
    return [
        (name, count, gradient.numel()) for (name, gradient), count in zip(named, counts.tolist(), strict=True) if count
    ]


def _count_nonfinite(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
    local = getattr(values, "to_local", None)  # a sharded gradient (DTensor): this process's part
    return (~torch.isfinite(local() if local is not None else values)).sum()


def name_parameters(
    groups: list[dict[str, Any]], model: torch.nn.Module | None, masters: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Pair the parameters of an optimizer with names: the model's, the optimizer's own, or positions."""
    names: dict[int, str] = {}
    if model is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
        if masters is not None:
            names |= {id(master): names[id(own)] for own, master in masters.pairs if id(own) in names}
    found = []
    for group_index, group in enumerate(groups):
        own_names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            position = f"param_groups[{group_index}]['params'][{index}] {tuple(parameter.shape)}"
            name = names.get(id(parameter)) or (own_names[index] if own_names else position)
            found.append((name, parameter))
    return found
