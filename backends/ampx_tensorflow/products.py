"""The functions of products that all of TensorFlow and Keras goes through, to be cast where Python calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import tensorflow as tf
from tensorflow.python.ops import gen_linalg_ops, gen_math_ops, gen_nn_ops

from ampx.policy import Dtype

from .casting import DTYPES

# What the graph rewriter casts, with the operands.
_PRODUCTS: Final[tuple[tuple[Any, Mapping[str, tuple[str, ...]]], ...]] = (
    (
        gen_math_ops,
        {
            "mat_mul": ("a", "b"),
            "batch_mat_mul": ("x", "y"),
            "batch_mat_mul_v2": ("x", "y"),
        },
    ),
    (gen_linalg_ops, {"einsum": ("inputs",)}),
    (
        gen_nn_ops,
        {
            "conv2d": ("input", "filter"),
            "conv2d_backprop_filter": ("input", "out_backprop"),
            "conv2d_backprop_input": ("filter", "out_backprop"),
            "conv3d": ("input", "filter"),
            "conv3d_backprop_filter_v2": ("input", "out_backprop"),
            "conv3d_backprop_input_v2": ("filter", "out_backprop"),
            "depthwise_conv2d_native": ("input", "filter"),
            "depthwise_conv2d_native_backprop_filter": ("input", "out_backprop"),
            "depthwise_conv2d_native_backprop_input": ("filter", "out_backprop"),
        },
    ),
)


def _flat(passed: Mapping[str, Any], operands: tuple[str, ...]) -> Sequence[Any]:
    return list(passed["inputs"]) if operands == ("inputs",) else [passed[name] for name in operands]


@contextmanager
def cast(
    dtype: Callable[[], Dtype],
    applies: Callable[[], bool] = lambda: True,
    count: Callable[[str, str], None] = lambda name, dtype: None,
) -> Iterator[None]:
    """Return a region in which float32 operands of products become low precision, and the results float32 again.

    Args:
        dtype: Returns the dtype of the moment.
        applies: Returns whether a product is looked at at all.
        count: Receives every product that was looked at, with the dtype that it computed in.
    """
    with ExitStack() as stack:
        for module, functions in _PRODUCTS:
            for name, operands in functions.items():
                product = _cast(getattr(module, name), operands, dtype, applies, count)
                stack.enter_context(mock.patch.object(module, name, product))
        yield


def _cast(
    native: Callable[..., Any],
    operands: tuple[str, ...],
    dtype: Callable[[], Dtype],
    applies: Callable[[], bool],
    count: Callable[[str, str], None],
) -> Callable[..., Any]:
    names = tuple(inspect.signature(native).parameters)
    kind = native.__name__.title().replace("_", "")  # "mat_mul" is MatMul, "conv2d" Conv2D

    @functools.wraps(native)
    def product(*args: Any, **kwargs: Any) -> Any:
        if not applies():
            return native(*args, **kwargs)
        passed = {**dict(zip(names, args, strict=False)), **kwargs}
        values = [tf.convert_to_tensor(value) for value in _flat(passed, operands)]
        low = DTYPES[dtype()]
        casts = low != tf.float32 and all(value.dtype == tf.float32 for value in values)
        if casts:
            values = [tf.cast(value, low) for value in values]
        passed.update({"inputs": values} if operands == ("inputs",) else zip(operands, values, strict=True))
        result = native(**passed)
        count(kind, result.dtype.name)
        return tf.cast(result, tf.float32) if casts else result

    return product
