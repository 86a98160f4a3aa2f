"""Clip true gradients in place."""

from __future__ import annotations

import math
from typing import Any

from .compat import mx
from .gradients import CHUNK

# By so much at once are gradients shrunk: the factor itself would leave float32's range.
_SMALLEST_FACTOR = 2.0**-64


def clip(
    gradients: list[dict[str, list[Any]]], max_norm: float | None, max_value: float | None, finite: Any = None
) -> tuple[bool, float | None]:
    """Clip finite gradients in place by value, then by global L2 norm; others stay as they are.

    Every context is clipped by the norm of its own gradients: where the trainer reduces them, all contexts hold the
    same; where it does not, every context trains a model of its own.

    Args:
        gradients: What `gradients.collect` gave.
        max_norm: Bound of the norm, or None.
        max_value: Bound of every element, or None.
        finite: One float32 element, not 0 where all gradients are finite, as `gradients.all_finite` gave it; None where
            they are known to be.

    Returns:
        Whether they are finite, and the first context's norm before clipping by norm, None where `max_norm` is None.

    Sync: one; where finite gradients have a norm beyond float32, and for sparse ones, some more.
    """
    with mx.autograd.pause():
        sums = [] if max_norm is None else [_sum_of_squares(batches, max_value) for batches in gradients if batches]
        flags = [] if finite is None else [finite]
        numbers = _read([*flags, *sums])
        if flags and not numbers[0]:
            return False, math.sqrt(numbers[1]) if sums else None
        if max_value is not None:
            for one in (one for batches in gradients for batch in batches.values() for one in batch):
                mx.nd.clip(one, -max_value, max_value, out=one)
        if max_norm is None:
            return True, None
        norms = []
        for batches, squares in zip((one for one in gradients if one), numbers[len(flags) :], strict=True):
            norm = math.sqrt(squares if math.isfinite(squares) else _wide_sum_of_squares(batches))
            norms.append(norm)
            if max_norm < norm < math.inf:  # else such gradients stay bit for bit
                _shrink(batches, max_norm / norm)
    return True, norms[0] if norms else 0.0


def _read(scalars: list[Any]) -> list[float]:
    """Read arrays of one element, on whatever contexts, with one sync."""
    if not scalars:
        return []
    first = scalars[0].context
    moved = [one.as_in_context(first).astype("float32").reshape((1,)) for one in scalars]
    numbers: list[float] = mx.nd.concat(*moved, dim=0).asnumpy().astype("float64").tolist()
    return numbers


def _shrink(batches: dict[str, list[Any]], factor: float) -> None:
    """Multiply gradients by a factor below 1, however small."""
    while factor < _SMALLEST_FACTOR:
        _shrink(batches, _SMALLEST_FACTOR)
        factor /= _SMALLEST_FACTOR
    for batch in batches.values():
        for one in batch:
            mx.nd._internal._mul_scalar(one, scalar=factor, out=one)


def _sum_of_squares(batches: dict[str, list[Any]], max_value: float | None) -> Any:
    """Return the sum of squares as clipped by value, a float32 array of one element; inf where float32 overflows."""
    sums: list[Any] = []
    for kind, batch in batches.items():
        values = batch if max_value is None else [mx.nd.clip(one, -max_value, max_value) for one in batch]
        if kind == "row_sparse":
            sums.extend(mx.nd.norm(one).square().reshape((1,)).astype("float32") for one in values)
        elif kind == "float32":
            for start in range(0, len(values), CHUNK):
                chunk = values[start : start + CHUNK]
                sums.append(mx.nd.multi_sum_sq(*chunk, num_arrays=len(chunk)).sum())
        else:
            sums.extend(one.astype("float32").square().sum() for one in values)
    return mx.nd.add_n(*sums)


def _wide_sum_of_squares(batches: dict[str, list[Any]]) -> float:
    """Return the sum of squares in float64, which no float32 elements overflow. Sync: one a gradient."""
    values = [one.data if kind == "row_sparse" else one for kind, batch in batches.items() for one in batch]
    return math.fsum(one.astype("float64").square().sum().asscalar() for one in values if one.size)
