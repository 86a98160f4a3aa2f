"""Where a non-finite value comes from: parameters by their gradients, modules by their outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch

# Of every tensor: whether it is finite, and its largest finite magnitude, both left on the device.
_Inputs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


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
        self.first: Overflow | None = None

    def __str__(self) -> str:
        first = self.first
        if first is None:
            return "no module's output overflowed"
        origin = "its inputs were finite" if first.inputs_finite else "its inputs were not finite either"
        return (
            f"{first.module or '(the model)'} ({first.kind}): {first.nonfinite} of {first.elements} outputs in "
            f"{first.dtype} are not finite; {origin}, the largest finite one being {first.largest_input:g}"
        )


@contextmanager
def trace_overflow(model: torch.nn.Module) -> Iterator[OverflowTrace]:
    """Watch the outputs of all modules until the first that is not finite.

    Compiled parts of the model run uncompiled inside (torch 2.6 and later), so that their modules are seen too.

    Sync: one a module call, until something is found.
    """
    trace = OverflowTrace()
    names = {module: name for name, module in model.named_modules()}
    # What each running call of a module received; looked at before the module can change it in place.
    received: dict[torch.nn.Module, list[_Inputs]] = {module: [] for module in names}

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if trace.first is None:
            received[module].append(_describe((args, kwargs)))

    def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = received[module].pop() if received[module] else None
        if trace.first is not None or inputs is None:
            return
        for tensor in _floating(output):
            nonfinite = int(_count_nonfinite(tensor))
            if nonfinite:
                trace.first = Overflow(
                    names[module],
                    type(module).__name__,
                    str(tensor.dtype).rpartition(".")[2],
                    nonfinite,
                    tensor.numel(),
                    all(bool(finite) for finite, _ in inputs),
                    max((float(largest) for _, largest in inputs), default=0.0),
                )
                return

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            # At the front: a hook of the user's may replace the output, and it is the module's own that counts.
            stack.callback(module.register_forward_hook(after, with_kwargs=True, prepend=True).remove)
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield trace


def _describe(tree: Any) -> _Inputs:
    """Note for every floating tensor whether it is finite, and its largest finite magnitude."""
    described = []
    for tensor in _floating(tree):
        values = _values(tensor)
        finite = torch.isfinite(values)
        magnitudes = torch.where(finite, values.abs(), 0)
        described.append((finite.all(), magnitudes.amax() if values.numel() else torch.zeros(())))
    return described


def _floating(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point() or tree.is_complex():
            yield tree.detach()
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _floating(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _floating(value)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _floating(getattr(tree, field.name))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored elements; of a sharded tensor (DTensor) this process's part."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout is not torch.strided:
        return tensor.values()
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def _count_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(_values(tensor))).sum()


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
