"""Inputs, constants and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from ampx.errors import UnsupportedByBackendError
from ampx_paddle.fluid.parameters import make_parameter, name_layer

from .activations import activate

__all__ = [
    "argmax",
    "assign",
    "cast",
    "concat",
    "create_parameter",
    "data",
    "expand",
    "fill_constant",
    "flatten",
    "gather",
    "gaussian_random",
    "one_hot",
    "ones",
    "reshape",
    "slice",
    "split",
    "squeeze",
    "stack",
    "topk",
    "transpose",
    "uniform_random",
    "unsqueeze",
    "zeros",
]


# -- inputs and constants ----------------------------------------------------------------------------------------


def data(
    name: str,
    shape: Sequence[int | None],
    append_batch_size: bool = True,
    dtype: str = "float32",
    lod_level: int = 0,
    type: Any = None,
    stop_gradient: bool = True,
) -> Any:
    """Return an input of the program.

    Args:
        name: By which it is fed.
        shape: Without the batch, which is put in front, unless an entry is -1 or None or `append_batch_size` is False.
        append_batch_size: See `shape`.
        dtype: The dtype that is fed.
        lod_level: 0; Paddle 3 has no sequences of different lengths in one tensor.
        type: Not looked at.
        stop_gradient: No gradient is computed for it.

    Raises:
        UnsupportedByBackendError: `lod_level` is not 0.
    """
    check_level(lod_level)
    sizes = [-1 if one is None else int(one) for one in shape]
    if append_batch_size and min(sizes, default=0) >= 0:
        sizes = [-1, *sizes]
    value = paddle.static.data(name, sizes, dtype)
    value.stop_gradient = stop_gradient
    return value


def check_level(lod_level: int) -> None:
    """Raise for sequences of different lengths.

    Raises:
        UnsupportedByBackendError: The level is not 0.
    """
    if lod_level:
        raise UnsupportedByBackendError(
            f"data got lod_level={lod_level}; accepted: 0, because Paddle 3 has no LoD tensors. Pad the sequences to "
            f"one length and feed their lengths beside them."
        )


def create_parameter(
    shape: Sequence[int],
    dtype: str,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Any = None,
) -> Any:
    """Return a parameter, by a name if wanted; float32 only."""
    if str(dtype) != "float32":
        raise UnsupportedByBackendError(
            f"create_parameter got dtype={dtype!r}; accepted: 'float32'. Casting is decorate's work."
        )
    given = paddle.ParamAttr._to_attr(attr)
    if name is not None and given.name is None:
        given.name = name
    return make_parameter(name_layer("create_parameter"), given, shape, is_bias, default_initializer)


def fill_constant(shape: Sequence[int], dtype: str, value: float, force_cpu: bool = False, out: Any = None) -> Any:
    """Return a tensor of one value."""
    made = paddle.full(shape, value, dtype)
    return made if out is None else paddle.assign(made, out)


def ones(shape: Sequence[int], dtype: str, force_cpu: bool = False) -> Any:
    """Return ones."""
    return paddle.ones(shape, dtype)


def zeros(shape: Sequence[int], dtype: str, force_cpu: bool = False, name: str | None = None) -> Any:
    """Return zeros."""
    return paddle.zeros(shape, dtype)


def gaussian_random(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, seed: int = 0, dtype: str = "float32"
) -> Any:
    """Return normal numbers; a seed other than 0 is refused, as `Program.random_seed` is for."""
    _check_seed(seed)
    return paddle.normal(mean, std, shape).astype(dtype)


def uniform_random(
    shape: Sequence[int], dtype: str = "float32", min: float = -1.0, max: float = 1.0, seed: int = 0
) -> Any:
    """Return uniform numbers; a seed other than 0 is refused, as `Program.random_seed` is for."""
    _check_seed(seed)
    return paddle.uniform(shape, dtype, min, max)


def _check_seed(seed: int) -> None:
    if seed:
        raise UnsupportedByBackendError(
            f"a random operator got seed={seed}; accepted: 0. Set the random_seed of the startup program instead."
        )


def assign(input: Any, output: Any = None) -> Any:
    """Copy a value or an array."""
    return paddle.assign(input, output)


# -- shapes ------------------------------------------------------------------------------------------------------


def reshape(
    x: Any,
    shape: Sequence[int],
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Any:
    """Return another shape, in which 0 keeps a size and -1 is what remains."""
    return activate(paddle.reshape(x, shape if actual_shape is None else actual_shape), act)


def transpose(x: Any, perm: Sequence[int], name: str | None = None) -> Any:
    """Reorder the axes."""
    return paddle.transpose(x, perm)


def flatten(x: Any, axis: int = 1, name: str | None = None) -> Any:
    """Return a matrix: the axes before `axis`, and those from it on."""
    rest = int(np.prod(x.shape[axis:]))
    return paddle.reshape(x, [-1, rest])


def squeeze(input: Any, axes: Sequence[int], name: str | None = None) -> Any:
    """Remove axes of size 1."""
    return paddle.squeeze(input, list(axes) or None)


def unsqueeze(input: Any, axes: Sequence[int], name: str | None = None) -> Any:
    """Insert axes of size 1."""
    return paddle.unsqueeze(input, axes)


def concat(input: Sequence[Any], axis: int = 0, name: str | None = None) -> Any:
    """Join along an axis."""
    return paddle.concat(list(input), axis)


def split(input: Any, num_or_sections: Any, dim: int = -1, name: str | None = None) -> Any:
    """Split along an axis."""
    return paddle.split(input, num_or_sections, dim)


def stack(x: Sequence[Any], axis: int = 0, name: str | None = None) -> Any:
    """Join along a new axis."""
    return paddle.stack(list(x), axis)


def slice(input: Any, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Any:
    """Cut along axes."""
    return paddle.slice(input, axes, starts, ends)


def expand(x: Any, expand_times: Sequence[int], name: str | None = None) -> Any:
    """Repeat along every axis."""
    return paddle.tile(x, expand_times)


def gather(input: Any, index: Any, overwrite: bool = True) -> Any:
    """Pick rows."""
    return paddle.gather(input, index)


def cast(x: Any, dtype: Any) -> Any:
    """Convert to a dtype."""
    return paddle.cast(x, dtype)


def one_hot(input: Any, depth: int, allow_out_of_range: bool = False) -> Any:
    """Return rows of zeros with one 1, for class numbers of shape (N, 1)."""
    last = input.shape[-1] == 1
    return paddle.nn.functional.one_hot(paddle.squeeze(input, -1) if last else input, depth)


def topk(input: Any, k: int, name: str | None = None) -> Any:
    """Return the largest values along the last axis, and where they are."""
    return paddle.topk(input, k)


def argmax(x: Any, axis: int = 0) -> Any:
    """Return where the largest value is."""
    return paddle.argmax(x, axis)
