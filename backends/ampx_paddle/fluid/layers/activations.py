"""Element-wise functions, and the `act` argument of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import paddle
from paddle.nn import functional

from ampx.errors import InvalidOptionError

__all__ = [
    "abs",
    "clip",
    "elu",
    "exp",
    "leaky_relu",
    "log",
    "pow",
    "relu",
    "relu6",
    "sigmoid",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "tanh",
]


def relu(x: Any, name: str | None = None) -> Any:
    """Return max(x, 0)."""
    return functional.relu(x)


def relu6(x: Any, threshold: float = 6.0, name: str | None = None) -> Any:
    """Return x between 0 and the threshold."""
    return paddle.clip(x, 0.0, threshold)


def leaky_relu(x: Any, alpha: float = 0.02, name: str | None = None) -> Any:
    """Return x, or alpha times x where it is negative."""
    return functional.leaky_relu(x, alpha)


def elu(x: Any, alpha: float = 1.0, name: str | None = None) -> Any:
    """Return x, or alpha times exp(x) - 1 where it is negative."""
    return functional.elu(x, alpha)


def sigmoid(x: Any, name: str | None = None) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return functional.sigmoid(x)


def tanh(x: Any, name: str | None = None) -> Any:
    """Return the hyperbolic tangent."""
    return paddle.tanh(x)


def softplus(x: Any, name: str | None = None) -> Any:
    """Return log(1 + exp(x))."""
    return functional.softplus(x)


def softmax(input: Any, use_cudnn: bool = False, name: str | None = None, axis: int = -1) -> Any:
    """Return probabilities along an axis; `use_cudnn` is Paddle's own choice."""
    return functional.softmax(input, axis)


def square(x: Any, name: str | None = None) -> Any:
    """Return x times x."""
    return paddle.square(x)


def sqrt(x: Any, name: str | None = None) -> Any:
    """Return the square root."""
    return paddle.sqrt(x)


def exp(x: Any, name: str | None = None) -> Any:
    """Return the exponential."""
    return paddle.exp(x)


def log(x: Any, name: str | None = None) -> Any:
    """Return the natural logarithm."""
    return paddle.log(x)


def abs(x: Any, name: str | None = None) -> Any:
    """Return the absolute value."""
    return paddle.abs(x)


def pow(x: Any, factor: float = 1.0, name: str | None = None) -> Any:
    """Return x to the power of a factor."""
    return paddle.pow(x, factor)


def clip(x: Any, min: float, max: float, name: str | None = None) -> Any:
    """Return x between two bounds."""
    return paddle.clip(x, min, max)


_ACTS: Final[dict[str, Callable[[Any], Any]]] = {
    "relu": relu,
    "relu6": relu6,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "softplus": softplus,
    "softmax": softmax,
}


def activate(value: Any, act: str | None) -> Any:
    """Apply what a layer was given as `act`.

    Raises:
        InvalidOptionError: There is no such activation.
    """
    if act is None:
        return value
    if act not in _ACTS:
        raise InvalidOptionError(f"act={act!r} is not known; accepted: {', '.join(_ACTS)}, or None. Pass one of these.")
    return _ACTS[act](value)
