"""MXNet's dtypes by their names, and the floating tensors of a tree."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from ampx.backend import leaves, map_leaves
from ampx.formats import FORMATS, Format
from ampx.policy import Dtype

from . import devices
from .compat import mx

# NumPy has no bfloat16: MXNet's is a structure of one 16-bit integer.
BFLOAT16: Final = np.dtype([("bfloat16", np.uint16)])
DTYPES: Final = {"float16": np.dtype("float16"), "bfloat16": BFLOAT16, "float32": np.dtype("float32")}
_FLOAT64_BITS: Final = 53  # of the significand
FLOATING: Final = frozenset(("float16", "bfloat16", "float32", "float64"))


@functools.cache  # NumPy makes the name anew each time, and every step asks
def name_of(dtype: Any) -> str:
    """Name a dtype of MXNet."""
    native = BFLOAT16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    return "bfloat16" if native == BFLOAT16 else native.name


def is_floating(tensor: Any) -> bool:
    """Return whether a tensor's dtype is floating."""
    return name_of(tensor.dtype) in FLOATING


def cast(tree: Any, dtype: Dtype) -> Any:
    """Cast the floating tensors of a tree, keeping its shape and types; the rest is returned as it is."""
    return each(tree, lambda tensor: cast_tensor(tensor, dtype))


def each(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the floating tensors of a tree, keeping its shape and types and all else that is in it."""
    return map_leaves(tree, lambda leaf: function(leaf) if _is_floating_tensor(leaf) else leaf)


def floating(tree: Any) -> Iterator[Any]:
    """Return the floating tensors of a tree."""
    return filter(_is_floating_tensor, leaves(tree))


def cast_tensor(tensor: Any, dtype: Dtype) -> Any:
    """Cast a floating tensor; gradients flow through."""
    wanted = DTYPES[dtype]
    if np.dtype(tensor.dtype) == wanted:
        return tensor
    if dtype == "bfloat16":
        wide = cast_tensor(tensor, "float32")
        # Native defect: MXNet's plain cast to bfloat16 cuts digits off; that of its amp rounds where oneDNN does it.
        if tensor.context.device_type != "cpu" or not devices.has_onednn():
            wide = _rounded(wide, FORMATS[dtype])
        return mx.nd.amp_cast(wide, dtype=wanted)
    if name_of(tensor.dtype) == "bfloat16":
        # Native defect: MXNet's plain cast refuses the layouts in which oneDNN leaves the outputs of convolutions.
        tensor = mx.nd.amp_cast(tensor, dtype=DTYPES["float32"])
    return tensor.astype(wanted, copy=False)


def _rounded(wide: Any, limits: Format) -> Any:
    """Round as `nearest`; the gradient flows through as it is."""
    with mx.autograd.pause():
        lost = nearest(wide, limits) - wide
    return mx.nd.where(mx.nd.contrib.isfinite(wide), wide + lost, wide)


def nearest(tensor: Any, limits: Format) -> Any:
    """Round an array's elements as a format would, to nearest even, by arithmetic; return them in float32."""
    values = cast_tensor(tensor, "float32").astype("float64")  # in float32, sums below would overflow
    # A sum with a power of two rounds to the last digit that it holds. What is below the smallest normal number has the
    # digits of that.
    magnitudes = values.abs()
    within = mx.nd.minimum(mx.nd.maximum(magnitudes, limits.smallest_normal), limits.largest)
    powers = 2.0 ** within.log2().floor()
    shift = powers * 2.0 ** (_FLOAT64_BITS - limits.bits)
    rounded = (magnitudes + shift) - shift
    beyond = mx.nd.full(values.shape, math.inf if limits.infinite else math.nan, ctx=values.context, dtype="float64")
    rounded = mx.nd.where(rounded > limits.overflows_from, beyond, rounded) * values.sign()
    return mx.nd.where(values == values, rounded, values).astype("float32")  # NaN is not equal to itself


def widest(tree: Any, at_least: Dtype) -> Dtype:
    """Return float32 if any floating tensor of a tree is wider than `at_least`."""
    wanted = DTYPES[at_least]
    return at_least if all(np.dtype(tensor.dtype) == wanted for tensor in floating(tree)) else "float32"


def _is_floating_tensor(leaf: Any) -> bool:
    return isinstance(leaf, mx.nd.NDArray) and is_floating(leaf)
