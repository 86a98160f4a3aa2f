"""Sums, products and means."""

from __future__ import annotations

from typing import Any

import paddle

from .activations import activate

__all__ = [
    "elementwise_add",
    "elementwise_div",
    "elementwise_max",
    "elementwise_min",
    "elementwise_mul",
    "elementwise_sub",
    "matmul",
    "mean",
    "mul",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "scale",
    "sum",
]


def _aligned(x: Any, y: Any, axis: int) -> Any:
    """Return y with axes of size 1 behind, so that its first axis meets that axis of x."""
    missing = len(x.shape) - axis - len(y.shape)
    return y if axis == -1 or missing <= 0 else paddle.unsqueeze(y, list(range(len(y.shape), len(y.shape) + missing)))


def elementwise_add(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
    """Return x + y."""
    return activate(paddle.add(x, _aligned(x, y, axis)), act)


def elementwise_sub(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
    """Return x - y."""
    return activate(paddle.subtract(x, _aligned(x, y, axis)), act)


def elementwise_mul(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
    """Return x * y."""
    return activate(paddle.multiply(x, _aligned(x, y, axis)), act)


def elementwise_div(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
    """Return x / y."""
    return activate(paddle.divide(x, _aligned(x, y, axis)), act)


def elementwise_max(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
    """Return the larger of x and y."""
    return activate(paddle.maximum(x, _aligned(x, y, axis)), act)


def elementwise_min(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
    """Return the smaller of x and y."""
    return activate(paddle.minimum(x, _aligned(x, y, axis)), act)


def matmul(
    x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, alpha: float = 1.0, name: str | None = None
) -> Any:
    """Return the matrix product, times alpha."""
    product = paddle.matmul(x, y, transpose_x, transpose_y)
    return product if alpha == 1.0 else product * alpha


def mul(x: Any, y: Any, x_num_col_dims: int = 1, y_num_col_dims: int = 1, name: str | None = None) -> Any:
    """Return the product of two tensors read as matrices."""
    product = paddle.matmul(_matrix(x, x_num_col_dims), _matrix(y, y_num_col_dims))
    shape = [*x.shape[:x_num_col_dims], *y.shape[y_num_col_dims:]]
    return product if len(shape) == 2 else paddle.reshape(product, shape)


def _matrix(value: Any, columns_from: int) -> Any:
    flat = value if len(value.shape) == columns_from + 1 else paddle.flatten(value, columns_from)
    return flat if columns_from == 1 else paddle.flatten(flat, 0, columns_from - 1)


def scale(
    x: Any,
    scale: float = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Return scale * x + bias."""
    return activate(paddle.scale(x, scale, bias, bias_after_scale), act)


def sum(x: Any) -> Any:
    """Add up tensors of one shape."""
    return paddle.add_n(x)


def mean(x: Any, name: str | None = None) -> Any:
    """Return the mean of all elements, of shape (1,)."""
    return paddle.reshape(paddle.mean(x), [1])


def _reduced(function: Any, input: Any, dim: Any, keep_dim: bool) -> Any:
    value = function(input, dim, keepdim=keep_dim)
    return paddle.reshape(value, [1]) if not value.shape else value


def reduce_sum(input: Any, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Add up along axes; of all elements, the result has shape (1,)."""
    return _reduced(paddle.sum, input, dim, keep_dim)


def reduce_mean(input: Any, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the mean along axes; of all elements, it has shape (1,)."""
    return _reduced(paddle.mean, input, dim, keep_dim)


def reduce_max(input: Any, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the largest value along axes; of all elements, it has shape (1,)."""
    return _reduced(paddle.max, input, dim, keep_dim)


def reduce_min(input: Any, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Any:
    """Return the smallest value along axes; of all elements, it has shape (1,)."""
    return _reduced(paddle.min, input, dim, keep_dim)
