"""Tensors: casting them in tuples, lists and dicts; what they store, and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any, Final

import torch

from ampx.backend import leaves
from ampx.policy import Dtype

DTYPES: Final[dict[Dtype, torch.dtype]] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
LOW: Final = (torch.float16, torch.bfloat16)
# Returns `.grad`, past what `ampx run` puts there to show scripts unscaled gradients.
gradient_of: Final[Callable[[torch.Tensor], torch.Tensor | None]] = torch._C.TensorBase.grad.__get__


def cast(tree: Any, dtype: torch.dtype, device: str | None = None, only: tuple[torch.dtype, ...] | None = None) -> Any:
    """Cast the floating tensors of a tree, keeping its shape and types; the rest is returned as it is."""
    if isinstance(tree, torch.Tensor):
        if not tree.is_floating_point() or (
            device is not None and (tree.device.type != device or tree.dtype == torch.float64)
        ):
            return tree
        return tree.to(dtype) if only is None or tree.dtype in only else tree
    if isinstance(tree, Mapping):
        return _like(tree, {key: cast(value, dtype, device, only) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return _like(tree, [cast(value, dtype, device, only) for value in tree])
    return tree


def convert(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree of the same shape and types whose floating tensors went through a function; as `cast`."""
    if isinstance(tree, torch.Tensor):
        return function(tree) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return _like(tree, {key: convert(value, function) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return _like(tree, [convert(value, function) for value in tree])
    if is_dataclass(tree) and not isinstance(tree, type):
        copied = copy.copy(tree)
        for part in fields(tree):
            object.__setattr__(copied, part.name, convert(getattr(tree, part.name), function))
        return copied
    return tree


def _like(tree: Any, values: Any) -> Any:
    """Return the values in a container of the tree's own type; the tree itself where nothing changed."""
    kind: Any = type(tree)
    if not isinstance(values, dict):
        # Containers need not have a constructor where there is nothing to cast; the compiler cannot compare them.
        if not torch.compiler.is_dynamo_compiling() and all(map(is_, tree, values)):
            return tree
        return kind(*values) if hasattr(tree, "_fields") else kind(values)
    if kind is dict or not isinstance(tree, MutableMapping):
        return kind(values)
    copied = copy.copy(tree)
    for key, value in values.items():
        copied[key] = value
    return copied


def floating(tree: Any) -> Iterator[torch.Tensor]:
    """Walk over the floating tensors of a tree."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored elements, as real numbers; of a sharded tensor (DTensor) this process's part."""
    tensor = tensor.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    local = getattr(tensor, "to_local", None)
    tensor = tensor if local is None else local()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor
