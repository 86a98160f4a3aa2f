"""What the meter has to say, counted by NumPy alone."""

import math

import numpy as np

from ampx.numerics.meter import ParameterMeter

LARGEST = {
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": float(np.finfo(np.float32).max),
}


def rounds_to_zero(number, dtype):
    """Return whether a number other than zero becomes zero in a dtype: it is nearer to that than to the smallest."""
    if dtype == "float16":
        return bool(np.float16(number) == 0)
    return dtype == "bfloat16" and abs(number) <= 2.0**-134


def count(name, dtype, before, after, gradient, compute):
    """Count one parameter, element by element."""
    rows = list(zip(np.ravel(before), np.ravel(after), strict=True))
    if gradient is None:
        return ParameterMeter(name, dtype, len(rows), 0, 0, 0, 0, None)
    moved = unchanged = flushed = nonfinite = 0
    largest = 0.0
    for (old, new), slope in zip(rows, map(float, np.ravel(gradient)), strict=True):
        if not math.isfinite(slope):
            nonfinite += 1
        elif slope:
            moved += 1
            unchanged += bool(old == new)
            flushed += rounds_to_zero(slope, compute)
            largest = max(largest, abs(slope))
    headroom = math.log2(LARGEST[compute]) - math.log2(largest) if largest else None
    return ParameterMeter(name, dtype, len(rows), moved, unchanged, flushed, nonfinite, headroom)
