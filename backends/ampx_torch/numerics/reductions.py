"""The numbers that a tensor is reduced to, on its device, and read together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampx.backend import Array
from ampx.formats import FORMATS
from ampx.numerics.watching import Tensors
from ampx_torch.trees import stored


def floating(tree: Any) -> Iterator[torch.Tensor]:
    """Walk over the floating and complex tensors of a tree whose elements can be read: tuples, dicts, dataclasses."""
    if isinstance(tree, torch.Tensor):
        if (tree.is_floating_point() or tree.is_complex()) and _is_readable(tree):
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


def _is_readable(tensor: torch.Tensor) -> bool:
    # A meta tensor has no elements, and classes that compute by themselves, such as quantized states, compute little.
    # Shards (DTensor) are read where they lie.
    dispatch = type(tensor).__torch_dispatch__
    return not tensor.is_meta and (dispatch is torch.Tensor.__torch_dispatch__ or hasattr(tensor, "to_local"))


def _reduced(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return in float64 what `_rows` makes `NUMBERS` of: inf and NaN count as zeros, and zeros as flushed."""
    limits = FORMATS[dtype]
    if values.dtype.itemsize < 4:
        values = values.float()
    finite = values.isfinite()
    magnitudes = values.abs().where(finite, 0.0)
    overflowed = magnitudes >= limits.halfway if limits.infinite else magnitudes > limits.halfway
    counts = [~finite, values.isnan(), magnitudes == 0, magnitudes <= limits.flushes_to, overflowed]
    smallest = magnitudes.where(magnitudes > 0, inf)
    extremes = [magnitudes.amax(), smallest.amin(), values.where(finite, inf).amin()]
    return torch.cat([torch.stack([mask.sum() for mask in counts]).double(), torch.stack(extremes).double()])


def _rows(vectors: Sequence[torch.Tensor]) -> list[list[float]]:
    rows = []
    for numbers in torch.stack(list(vectors)).tolist():
        nonfinite, nan, empty, flushed, overflowed, largest, smallest, lowest = numbers
        rows.append([nonfinite, nan, empty - nonfinite, largest, smallest, lowest, flushed - empty, overflowed])
    return rows


def _arrays(samples: Sequence[torch.Tensor]) -> list[Array]:
    joined = torch.cat(list(samples)).cpu()
    return [part.numpy() for part in joined.split([len(sample) for sample in samples])]


@contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch.no_grad():
        yield


def wait(tree: Any) -> None:
    """Wait for the devices of some tensors."""
    for device in {tensor.device for tensor in floating(tree) if tensor.is_cuda}:
        torch.cuda.synchronize(device)


TENSORS: Final = Tensors(
    unseen=_unseen,
    floating=floating,
    dtype=lambda tensor: str(tensor.dtype).removeprefix("torch."),
    held=stored,
    size=lambda values: int(values.numel()),
    reduce=_reduced,
    flat=lambda values: values.reshape(-1),
    sample=lambda values: values.to(torch.float32, copy=True),
    device=lambda tensor: tensor.device,
    rows=_rows,
    arrays=_arrays,
)
