"""TensorFlow's tensors as the precision debugger reads them: reduced on their device to a few integers."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from ampx.formats import FORMATS
from ampx.numerics.watching import Tensors

_INFINITY: Final = 0x7F800000  # magnitudes of float32, as integers, are in the order of the numbers
_LARGEST: Final = 0x7FFFFFFF


class _Unwatched(threading.local):
    """Whether operations of the calling thread are those of a watcher."""

    active = False


_unwatched: Final = _Unwatched()


def is_unwatched() -> bool:
    """Return whether operations of the calling thread are those of a watcher."""
    return _unwatched.active


@contextmanager
def unwatched() -> Iterator[None]:
    """Return a region whose operations no watcher reports."""
    before, _unwatched.active = _unwatched.active, True
    try:
        yield
    finally:
        _unwatched.active = before


def floating(tree: Any) -> list[Any]:
    """List the floating tensors of a tree; of sparse ones the values."""
    leaves = []
    for leaf in tf.nest.flatten(tree, expand_composites=True):
        if isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating):
            leaves.append(tf.convert_to_tensor(leaf))
        elif isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating:
            leaves.append(leaf)
    return leaves


def _numbers(row: list[int]) -> list[float]:
    nonfinite, nan, zeros, flushed, overflowed, largest, smallest, lowest = row
    bounds = [math.inf if bits == _LARGEST else math.copysign(_number(abs(bits)), bits) for bits in (smallest, lowest)]
    return [nonfinite, nan, zeros, _number(max(largest, 0)), *bounds, flushed, overflowed]


def _rows(vectors: Sequence[Any]) -> list[list[float]]:
    return list(map(_numbers, tf.stack(vectors).numpy().tolist()))


def _number(bits: int) -> float:
    return float(np.array(bits, np.uint32).view(np.float32))


def _bits(number: float) -> int:
    return int(np.array(number, np.float32).view(np.int32))


@functools.cache
def _thresholds(dtype: str) -> tuple[int, int]:
    """Return the largest magnitude that a dtype rounds to zero, and the largest that it does not round up."""
    form = FORMATS[dtype]
    if dtype == "float32":
        return 0, _INFINITY - 1
    return _bits(form.flushes_to), _bits(form.overflows_from) - 1


@functools.cache
def _reduction(dtype: tf.DType, watched: str) -> Any:
    """Return a compiled function: it runs as a graph even where functions run uncompiled.

    It computes with the bits, since TensorFlow's kernels take subnormal numbers for zero.
    """
    zero, most = _thresholds(watched)

    def reduce_one(tensor: Any) -> Any:
        wide = tensor if dtype == tf.float32 else tf.cast(tensor, tf.float32)
        bits = tf.reshape(tf.bitcast(wide, tf.int32), [-1])
        magnitude = tf.bitwise.bitwise_and(bits, tf.constant(_LARGEST))
        finite, nonzero = magnitude < _INFINITY, magnitude > 0
        signed = tf.where(bits < 0, -magnitude, magnitude)

        def count(condition: Any) -> Any:
            return tf.reduce_sum(tf.cast(condition, tf.int64))

        ones = [
            count(~finite),
            count(magnitude > _INFINITY),
            count(~nonzero),
            count(nonzero & (magnitude <= zero)),
            count(finite & (magnitude > most)),
        ]
        bounds = [
            tf.reduce_max(tf.where(finite, magnitude, 0)),
            tf.reduce_min(tf.where(finite & nonzero, magnitude, _LARGEST)),
            tf.reduce_min(tf.where(finite, signed, _LARGEST)),
        ]
        return tf.stack([*ones, *(tf.cast(bound, tf.int64) for bound in bounds)])

    with tf.init_scope():
        return tf.function(reduce_one, autograph=False).get_concrete_function(tf.TensorSpec(None, dtype))


@contextmanager
def _unseen() -> Iterator[None]:
    with unwatched(), record.stop_recording():
        yield


TENSORS: Final = Tensors(
    unseen=_unseen,
    floating=floating,
    dtype=lambda tensor: str(tensor.dtype.name),
    held=lambda tensor: tensor,
    size=lambda tensor: int(tensor.shape.num_elements()),
    reduce=lambda tensor, watched: _reduction(tensor.dtype, watched)(tensor),
    flat=lambda tensor: tf.cast(tf.reshape(tensor, [-1]), tf.float32),
    sample=lambda values: values,
    device=lambda tensor: tensor.device,
    rows=_rows,
    arrays=lambda samples: [sample.numpy() for sample in samples],
)
