"""The numbers that a tensor is reduced to, on its device, and read together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import frexp, inf
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampx.numerics.formats import FORMATS
from ampx.numerics.probe import Stats

# How many elements, and on their device in float64: not finite, NaN, of magnitude 0 or not finite, flushed and
# of magnitude 0 or not finite, overflowed; largest, smallest non-zero and lowest finite.
Reduced: TypeAlias = tuple[int, torch.Tensor]


@dataclass(frozen=True)
class Limits:
    """Where a dtype rounds to zero, and beyond what it can hold.

    Attributes:
        flushes: The largest magnitude that becomes zero: half of the smallest, a tie that is rounded to even.
        overflows: The smallest magnitude that becomes infinite, or where there is no infinity the largest that
            is still rounded to a number.
        infinite: Which of the two.
    """

    flushes: float
    overflows: float
    infinite: bool

    @classmethod
    def of(cls, dtype: str) -> Limits:
        """Return those of a dtype of `FORMATS`."""
        form = FORMATS[dtype]
        _, exponent = frexp(form.largest)
        half = 2.0 ** (exponent - form.bits - 1)
        return cls(form.smallest / 2, form.largest + half, form.infinite)


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


def reduce(tensors: Iterable[torch.Tensor], limits: Limits) -> list[Reduced]:
    """Reduce tensors; none is waited for, and modes of the user do not see it."""
    with _disable_current_modes(), torch.no_grad():
        return [(values.numel(), _reduced(values, limits)) for values in map(stored, tensors) if values.numel()]


def _reduced(values: torch.Tensor, limits: Limits) -> torch.Tensor:
    if values.dtype.itemsize < 4:
        values = values.float()
    finite = values.isfinite()
    magnitudes = values.abs().where(finite, 0.0)
    overflowed = magnitudes >= limits.overflows if limits.infinite else magnitudes > limits.overflows
    counts = [~finite, values.isnan(), magnitudes == 0, magnitudes <= limits.flushes, overflowed]
    smallest = magnitudes.where(magnitudes > 0, inf)
    extremes = [magnitudes.amax(), smallest.amin(), values.where(finite, inf).amin()]
    return torch.cat([torch.stack([mask.sum() for mask in counts]).double(), torch.stack(extremes).double()])


def read(reduced: Sequence[Sequence[Reduced]]) -> list[Stats]:
    """Return the numbers of each. Sync: one a device."""
    vectors: dict[torch.device, list[torch.Tensor]] = {}
    for parts in reduced:
        for _, vector in parts:
            vectors.setdefault(vector.device, []).append(vector)
    with _disable_current_modes():
        rows = {device: iter(torch.stack(tensors).tolist()) for device, tensors in vectors.items()}
    return [_joined([(elements, next(rows[vector.device])) for elements, vector in parts]) for parts in reduced]


def _joined(parts: Sequence[tuple[int, Sequence[float]]]) -> Stats:
    if not parts:
        return Stats()
    nonfinite, nan, empty, flushed, overflowed = (int(sum(row[place] for _, row in parts)) for place in range(5))
    smallest, lowest = (min(row[place] for _, row in parts) for place in (6, 7))
    return Stats(
        elements=sum(elements for elements, _ in parts),
        nonfinite=nonfinite,
        nan=nan,
        zeros=empty - nonfinite,
        largest=max(row[5] for _, row in parts),
        smallest=0.0 if smallest == inf else smallest,
        lowest=0.0 if lowest == inf else lowest,
        flushed=flushed - empty,
        overflowed=overflowed,
    )
