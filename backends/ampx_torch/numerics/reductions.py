"""The numbers that a tensor is reduced to, on its device, and read together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampx.backend import Array
from ampx.formats import FORMATS, Format
from ampx.numerics.watching import Reduced
from ampx_torch.trees import stored


def floating(tree: Any) -> Iterator[torch.Tensor]:
    """Walk over the floating and complex tensors of a tree, detached: tuples, dicts, dataclasses."""
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point() or tree.is_complex():
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from floating(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from floating(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from floating(getattr(tree, field.name, None))


def reduce(tensors: Iterable[torch.Tensor], dtype: str) -> list[Reduced]:
    """Reduce tensors; none is waited for, and modes of the user do not see it.

    Args:
        tensors: Floating tensors.
        dtype: The dtype that is watched.
    """
    limits = FORMATS[dtype]
    with _disable_current_modes(), torch.no_grad():
        return [(values.numel(), _reduced(values, limits)) for values in map(stored, tensors) if values.numel()]


def _reduced(values: torch.Tensor, limits: Format) -> torch.Tensor:
    """Return in float64 what `read` makes `NUMBERS` of: inf and NaN count as zeros, and zeros as flushed."""
    if values.dtype.itemsize < 4:
        values = values.float()
    finite = values.isfinite()
    magnitudes = values.abs().where(finite, 0.0)
    overflowed = magnitudes >= limits.halfway if limits.infinite else magnitudes > limits.halfway
    counts = [~finite, values.isnan(), magnitudes == 0, magnitudes <= limits.flushes_to, overflowed]
    smallest = magnitudes.where(magnitudes > 0, inf)
    extremes = [magnitudes.amax(), smallest.amin(), values.where(finite, inf).amin()]
    return torch.cat([torch.stack([mask.sum() for mask in counts]).double(), torch.stack(extremes).double()])


def read(vectors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Bring reduced tensors to the host. Sync: one a device."""
    rows = []
    for numbers in _by_device(vectors, lambda tensors: torch.stack(tensors).tolist()):
        nonfinite, nan, empty, flushed, overflowed, largest, smallest, lowest = numbers
        rows.append([nonfinite, nan, empty - nonfinite, largest, smallest, lowest, flushed - empty, overflowed])
    return rows


def read_samples(samples: Sequence[torch.Tensor]) -> list[Array]:
    """Bring samples to the host. Sync: one a device."""

    def arrays(tensors: list[torch.Tensor]) -> list[Array]:
        joined = torch.cat(tensors).cpu()
        return [part.numpy() for part in joined.split([len(tensor) for tensor in tensors])]

    return _by_device(samples, arrays)


def _by_device(tensors: Sequence[torch.Tensor], bring: Callable[[list[torch.Tensor]], list[Any]]) -> list[Any]:
    """Return what a function makes of the tensors of each device, in the order of the tensors."""
    held: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        held.setdefault(tensor.device, []).append(tensor)
    with _disable_current_modes():
        brought = {device: iter(bring(own)) for device, own in held.items()}
    return [next(brought[tensor.device]) for tensor in tensors]
