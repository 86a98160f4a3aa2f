"""What a dtype makes of numbers, in NumPy: the rule that every backend's own counting is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from ampx.backend import Array
from ampx.formats import FORMATS, find_digits, to_digits

from .probe import Stats
from .watching import NUMBERS, Tensors, sample_slices


def round_to(values: Any, dtype: str) -> Array:
    """Round numbers to the nearest that a dtype can hold, ties to even.

    Args:
        values: Numbers of any shape.
        dtype: A name of `FORMATS`, or what `digits_of` returns.

    Returns:
        The rounded numbers as float32: beyond the largest number infinity, or NaN where the dtype has no infinity.
    """
    exact = np.asarray(values, np.float32)
    bits = find_digits(dtype)
    if bits is not None:
        with np.errstate(all="ignore"):
            nearest = to_digits(exact, bits).astype(np.float32)
        return np.where(np.isfinite(nearest), nearest, exact)
    form = FORMATS[dtype]
    if dtype == "float32":
        return exact.copy()
    _, least = np.frexp(form.smallest)
    with np.errstate(all="ignore"):  # a signalling NaN warns when it is converted
        wide = exact.astype(np.float64)
        _, exponent = np.frexp(np.where(np.isfinite(wide), wide, 0.0))  # a magnitude of [2**(exponent-1), 2**exponent)
        step = np.ldexp(1.0, np.maximum(exponent - form.bits, least - 1))
        rounded = np.where(np.isfinite(wide), np.rint(wide / step) * step, wide)
        beyond = np.abs(rounded) > form.largest
        rounded = np.where(beyond, np.copysign(np.inf, rounded) if form.infinite else np.nan, rounded)
        return rounded.astype(np.float32)


def is_rounded(values: Array, dtype: str) -> bool:
    """Return whether numbers, of more than one magnitude, are all finite ones that a dtype can hold."""
    several = np.isfinite(values).all() and np.unique(np.abs(values)).size > 1
    return bool(several) and np.array_equal(values, round_to(values, dtype))


def describe(values: Any, dtype: str = "float16") -> Stats:
    """Count what `Stats` counts, of numbers of any shape, for the dtype that is watched."""
    flat = np.asarray(values).astype(np.float32).reshape(-1)
    finite = flat[np.isfinite(flat)]
    magnitude = np.abs(finite)
    rounded = round_to(finite, dtype)
    nonzero = magnitude > 0
    return Stats(
        elements=flat.size,
        nonfinite=flat.size - finite.size,
        nan=int(np.isnan(flat).sum()),
        zeros=int((~nonzero).sum()),
        largest=float(magnitude.max(initial=0.0)),
        smallest=float(magnitude[nonzero].min()) if nonzero.any() else 0.0,
        lowest=float(finite.min()) if finite.size else 0.0,
        flushed=int((nonzero & (rounded == 0)).sum()),
        overflowed=int((~np.isfinite(rounded)).sum()),
    )


def sample(values: Any, samples: int) -> Array:
    """Return at most so many elements as float32: those at multiples of a stride, row by row."""
    flat = np.asarray(values).reshape(-1)
    return flat[sample_slices([flat.size], samples)[0]].astype(np.float32)


def host_tensors(
    floating: Callable[[Any], Iterable[Any]], dtype: Callable[[Any], str], values: Callable[[Any], Any]
) -> Tensors:
    """Return the table of a framework whose numbers NumPy reads on the host.

    Args:
        floating: Lists the floating tensors of a tree.
        dtype: Returns the name of a tensor's dtype.
        values: Returns the numbers of a tensor, in any shape.
    """
    return Tensors(
        unseen=nullcontext,
        floating=floating,
        dtype=dtype,
        held=lambda tensor: np.asarray(values(tensor), np.float32).reshape(-1),
        size=np.size,
        reduce=_numbers,
        flat=lambda held: held,
        sample=np.copy,
        device=lambda tensor: None,
        rows=list,
        arrays=list,
    )


def _numbers(values: Any, dtype: str) -> list[float]:
    stats = describe(values, dtype)
    numbers = {name: float(getattr(stats, name)) for name in NUMBERS}
    numbers["smallest"] = numbers["smallest"] or math.inf
    if stats.elements == stats.nonfinite:
        numbers["lowest"] = math.inf
    return list(numbers.values())
