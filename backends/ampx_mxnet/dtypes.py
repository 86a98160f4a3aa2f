"""MXNet's dtypes by their names, and the floating tensors of a tree."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from ampx.policy import Dtype

from .compat import mx

# NumPy has no bfloat16: MXNet's is a structure of one 16-bit integer.
BFLOAT16: Final = np.dtype([("bfloat16", np.uint16)])
DTYPES: Final = {"float16": np.dtype("float16"), "bfloat16": BFLOAT16, "float32": np.dtype("float32")}
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
    if isinstance(tree, mx.nd.NDArray):
        return cast_tensor(tree, dtype) if is_floating(tree) else tree
    if isinstance(tree, Mapping):
        kind: Any = type(tree)
        return kind({key: cast(value, dtype) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        values = [cast(value, dtype) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def cast_tensor(tensor: Any, dtype: Dtype) -> Any:
    """Cast a floating tensor; gradients flow through."""
    wanted = DTYPES[dtype]
    if np.dtype(tensor.dtype) == wanted:
        return tensor
    if dtype == "bfloat16":
        # Native defect: MXNet's plain cast to bfloat16 cuts digits off; that of its amp rounds.
        return mx.nd.amp_cast(tensor.astype("float32"), dtype=wanted)
    return tensor.astype(wanted)


def widest(tree: Any, at_least: Dtype) -> Dtype:
    """Return float32 if any floating tensor of a tree is wider than `at_least`."""
    wanted = DTYPES[at_least]
    return at_least if all(np.dtype(tensor.dtype) == wanted for tensor in _floating(tree)) else "float32"


def _floating(tree: Any) -> Iterator[Any]:
    if isinstance(tree, mx.nd.NDArray):
        if is_floating(tree):
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _floating(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _floating(value)
