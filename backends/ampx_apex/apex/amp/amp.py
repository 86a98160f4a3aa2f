"""Annotations and registries of functions, and the older way to begin: `init`."""

from __future__ import annotations

from typing import Any

from ampx.annotate import Function

from . import decorators, registry
from .frontend import begin_handle
from .handle import AmpHandle, NoOpHandle


def half_function(fn: Function) -> Function:
    """Have a function get its floating arguments in low precision where operations are cast."""
    return decorators.annotate(fn, "half")


def float_function(fn: Function) -> Function:
    """Have a function compute in float32 where operations are cast."""
    return decorators.annotate(fn, "float")


def promote_function(fn: Function) -> Function:
    """Have a function get its floating arguments in the widest of their dtypes."""
    return decorators.annotate(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Have a function of a module get low precision from the next `initialize` at O1 on."""
    registry.add(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Have a function of a module compute in float32 from the next `initialize` at O1 on."""
    registry.add(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Have a function of a module get its arguments' widest dtype from the next `initialize` at O1 on."""
    registry.add(module, name, "promote")


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    dtype: object = None,
) -> AmpHandle | NoOpHandle:
    """Cast operations from here on, the older way; losses are scaled through the handle that is returned.

    With `allow_banned`, binary_cross_entropy computes in float32 instead of refusing low-precision input. Weights are
    cast anew in every use outside `ampx.autocast` regions, whatever `enable_caching` says, and nothing is printed.

    Raises:
        PropertyError: The loss scale is neither `"dynamic"` nor a number.
        InvalidOptionError: The dtype is neither float16 nor bfloat16.
    """
    return begin_handle(enabled, loss_scale, allow_banned, dtype)
