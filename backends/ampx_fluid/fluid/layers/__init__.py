"""`fluid.layers`: what training scripts with mixed precision use of it, on Paddle's own functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import paddle
from paddle.nn import functional

from ampx.errors import UnsupportedByBackendError
from ampx_fluid.fluid.missing import refuse_missing

from . import learning_rate, networks
from .networks import activate

# fluid's name and arguments, and what Paddle has for them. `name`, `use_cudnn` and `force_cpu` changed no number.
# In fluid, the mean or the sum of all elements had shape (1,).
_TABLE: Final[dict[str, Callable[..., Any]]] = {
    # of every element
    "abs": lambda x, name=None: paddle.abs(x),
    "cast": lambda x, dtype: paddle.cast(x, dtype),
    "clip": lambda x, min, max, name=None: paddle.clip(x, min, max),
    "elu": lambda x, alpha=1.0, name=None: functional.elu(x, alpha),
    "exp": lambda x, name=None: paddle.exp(x),
    "leaky_relu": lambda x, alpha=0.02, name=None: functional.leaky_relu(x, alpha),
    "log": lambda x, name=None: paddle.log(x),
    "pow": lambda x, factor=1.0, name=None: paddle.pow(x, factor),
    "relu": lambda x, name=None: functional.relu(x),
    "relu6": lambda x, threshold=6.0, name=None: paddle.clip(x, 0.0, threshold),
    "scale": lambda x, scale=1.0, bias=0.0, bias_after_scale=True, act=None, name=None: activate(
        paddle.scale(x, scale, bias, bias_after_scale), act
    ),
    "sigmoid": lambda x, name=None: functional.sigmoid(x),
    "softmax": lambda input, use_cudnn=False, name=None, axis=-1: functional.softmax(input, axis),
    "softplus": lambda x, name=None: functional.softplus(x),
    "sqrt": lambda x, name=None: paddle.sqrt(x),
    "square": lambda x, name=None: paddle.square(x),
    "tanh": lambda x, name=None: paddle.tanh(x),
    # of several tensors, and over axes
    "accuracy": lambda input, label, k=1, correct=None, total=None: paddle.reshape(
        paddle.static.accuracy(input, label, k), [1]
    ),
    "argmax": lambda x, axis=0: paddle.argmax(x, axis),
    "mean": lambda x, name=None: paddle.reshape(paddle.mean(x), [1]),
    "square_error_cost": lambda input, label: paddle.square(input - label),
    "sum": lambda x: paddle.add_n(x),
    "topk": lambda input, k, name=None: paddle.topk(input, k),
    # constants
    "assign": lambda input, output=None: paddle.assign(input, output),
    "ones": lambda shape, dtype, force_cpu=False: paddle.ones(shape, dtype),
    "zeros": lambda shape, dtype, force_cpu=False, name=None: paddle.zeros(shape, dtype),
    # shapes
    "concat": lambda input, axis=0, name=None: paddle.concat(list(input), axis),
    "expand": lambda x, expand_times, name=None: paddle.tile(x, expand_times),
    "flatten": lambda x, axis=1, name=None: paddle.reshape(x, [-1, int(np.prod(x.shape[axis:]))]),
    "gather": lambda input, index, overwrite=True: paddle.gather(input, index),
    "one_hot": lambda input, depth, allow_out_of_range=False: functional.one_hot(
        paddle.squeeze(input, -1) if input.shape[-1] == 1 else input, depth
    ),
    "reshape": lambda x, shape, actual_shape=None, act=None, inplace=False, name=None: activate(
        paddle.reshape(x, shape if actual_shape is None else actual_shape), act
    ),
    "slice": lambda input, axes, starts, ends: paddle.slice(input, axes, starts, ends),
    "split": lambda input, num_or_sections, dim=-1, name=None: paddle.split(input, num_or_sections, dim),
    "squeeze": lambda input, axes, name=None: paddle.squeeze(input, list(axes) or None),
    "stack": lambda x, axis=0, name=None: paddle.stack(list(x), axis),
    "transpose": lambda x, perm, name=None: paddle.transpose(x, perm),
    "unsqueeze": lambda input, axes, name=None: paddle.unsqueeze(input, axes),
}


def _elementwise(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a function of two tensors; the first axis of y meets the axis of x."""

    def apply(x: Any, y: Any, axis: int = -1, act: str | None = None, name: str | None = None) -> Any:
        missing = len(x.shape) - axis - len(y.shape)
        if axis != -1 and missing > 0:
            y = paddle.unsqueeze(y, list(range(len(y.shape), len(y.shape) + missing)))
        return activate(function(x, y), act)

    return apply


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(input: Any, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Any:
        value = function(input, dim, keepdim=keep_dim)
        return value if value.shape else paddle.reshape(value, [1])

    return reduce


_TABLE.update(
    elementwise_add=_elementwise(paddle.add),
    elementwise_sub=_elementwise(paddle.subtract),
    elementwise_mul=_elementwise(paddle.multiply),
    elementwise_div=_elementwise(paddle.divide),
    elementwise_max=_elementwise(paddle.maximum),
    elementwise_min=_elementwise(paddle.minimum),
    reduce_sum=_reduced(paddle.sum),
    reduce_mean=_reduced(paddle.mean),
    reduce_max=_reduced(paddle.max),
    reduce_min=_reduced(paddle.min),
)
for _name, _function in _TABLE.items():
    _function.__name__ = _function.__qualname__ = _name  # Python's errors name it
_TABLE.update((name, getattr(module, name)) for module in (learning_rate, networks) for name in module.__all__)
globals().update(_TABLE)
# Modules that the layers were spread over in earlier releases.
FORMER: Final = ("activations", "losses", "sums", "tensors")
globals().update(dict.fromkeys(FORMER, sys.modules[__name__]))


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
    """
    check_level(lod_level)
    sizes = [-1 if size is None else int(size) for size in shape]
    if append_batch_size and min(sizes, default=0) >= 0:
        sizes = [-1, *sizes]
    value = paddle.static.data(name, sizes, dtype)
    value.stop_gradient = stop_gradient
    return value


def check_level(lod_level: int) -> None:
    """Raise for sequences of different lengths."""
    if lod_level:
        raise UnsupportedByBackendError(
            f"data got lod_level={lod_level}; accepted: 0, because Paddle 3 has no LoD tensors. Pad the sequences to "
            f"one length and feed their lengths beside them."
        )


def fill_constant(shape: Sequence[int], dtype: str, value: float, force_cpu: bool = False, out: Any = None) -> Any:
    """Return a tensor of one value, or write it to `out`."""
    constant = paddle.full(shape, value, dtype)
    return constant if out is None else paddle.assign(constant, out)


def gaussian_random(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, seed: int = 0, dtype: str = "float32"
) -> Any:
    """Return normal numbers."""
    _check_seed(seed)
    return paddle.normal(mean, std, shape).astype(dtype)


def uniform_random(
    shape: Sequence[int], dtype: str = "float32", min: float = -1.0, max: float = 1.0, seed: int = 0
) -> Any:
    """Return uniform numbers."""
    _check_seed(seed)
    return paddle.uniform(shape, dtype, min, max)


def _check_seed(seed: int) -> None:
    if seed:
        raise UnsupportedByBackendError(
            f"a random operator got seed={seed}; accepted: 0. Set the random_seed of the startup program instead."
        )


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


def cross_entropy(input: Any, label: Any, soft_label: bool = False, ignore_index: int = -100) -> Any:
    """Return -log of the probability of the right class, of shape (N, 1).

    Args:
        input: Probabilities of shape (N, classes), after a softmax.
        label: Class numbers of shape (N, 1), or probabilities if `soft_label`.
        soft_label: See `label`.
        ignore_index: Class number that counts nothing.
    """
    options = {"soft_label": soft_label, "ignore_index": ignore_index, "use_softmax": False, "reduction": "none"}
    return functional.cross_entropy(input, label, **options)


def softmax_with_cross_entropy(
    logits: Any,
    label: Any,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Any:
    """Return the cross entropy of the softmax, of shape (N, 1); with `return_softmax` the probabilities, too."""
    options = {"soft_label": soft_label, "ignore_index": ignore_index, "reduction": "none", "axis": axis}
    loss = functional.cross_entropy(logits, label, **options)
    return (loss, functional.softmax(logits, axis)) if return_softmax else loss


def sigmoid_cross_entropy_with_logits(
    x: Any, label: Any, ignore_index: int = -100, name: str | None = None, normalize: bool = False
) -> Any:
    """Return the cross entropy of the sigmoid, element by element; `normalize` divides by how many labels count."""
    loss = functional.binary_cross_entropy_with_logits(x, label, reduction="none")
    counts = (label != ignore_index).astype("float32")
    loss = loss * counts
    return loss / counts.sum() if normalize else loss


__all__ = [
    *_TABLE,
    "cross_entropy",
    "data",
    "fill_constant",
    "gaussian_random",
    "matmul",
    "mul",
    "sigmoid_cross_entropy_with_logits",
    "softmax_with_cross_entropy",
    "uniform_random",
]

__getattr__ = refuse_missing(__name__)
