"""Checks of arguments that several calls share."""

from __future__ import annotations

from typing import Any

from .backend import Backend
from .errors import InvalidOptionError, NotWrappedError
from .optimizer import WrappedOptimizer


def wrapped_optimizers(opt: Any, call: str) -> list[WrappedOptimizer]:
    """Give the wrapped optimizers of one argument.

    Raises:
        NotWrappedError: One is not wrapped.
    """
    optimizers = list(opt) if isinstance(opt, (list, tuple)) else [opt]
    for one in optimizers:
        if not isinstance(one, WrappedOptimizer):
            raise NotWrappedError(
                f"{call} got {type(one).__name__}, which wrap_optimizer did not return; accepted: wrapped optimizers. "
                f"Call opt = ampx.wrap_optimizer(opt) first and pass its result."
            )
    return optimizers


def one_wrapped_optimizer(opt: Any, call: str) -> WrappedOptimizer:
    """Give the wrapped optimizer of an argument that takes one.

    Raises:
        NotWrappedError: It is not wrapped.
        InvalidOptionError: It is a list of none or several.
    """
    optimizers = wrapped_optimizers(opt, call)
    if len(optimizers) != 1:
        raise InvalidOptionError(
            f"{call} got a list of {len(optimizers)} optimizers; accepted: one optimizer. Call it for each."
        )
    return optimizers[0]


def check_bound(name: str, bound: object) -> None:
    """Raise unless a bound is None or a positive number.

    Raises:
        InvalidOptionError: It is neither.
    """
    number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
    if bound is not None and not (number and bound > 0):  # type: ignore[operator]
        raise InvalidOptionError(f"{name}={bound!r} is not a bound; accepted: a positive number, or None. Change it.")


def check_clipping(backend: Backend) -> None:
    """Raise where a backend does not clip gradients.

    Raises:
        UnsupportedByBackendError: `capabilities.clipping` is not declared.
    """
    if not backend.capabilities.clipping:
        backend.refuse("gradient clipping (max_grad_norm, max_grad_value, clip_grad_norm)")
