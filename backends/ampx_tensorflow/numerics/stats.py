"""Floating tensors, reduced on their device to a few integers that are read together."""

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

from ampx.numerics.formats import FORMATS
from ampx.numerics.probe import Stats

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


def reduce(tensors: Sequence[Any], dtype: str) -> list[Any]:
    """Reduce tensors to one tensor of counts and bounds each, for `read`.

    Args:
        tensors: Floating tensors.
        dtype: The dtype that is watched.
    """
    with unwatched(), record.stop_recording():
        return [_reduction(tensor.dtype, dtype)(tensor) for tensor in tensors]


def sample(tensors: Sequence[Any], samples: int) -> Any:
    """Return at most so many elements as float32, spread over all tensors; on the device."""
    with unwatched(), record.stop_recording():
        flat = [tf.cast(tf.reshape(tensor, [-1]), tf.float32) for tensor in tensors]
        joined = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
        return joined[:: max(1, math.ceil(int(joined.shape[0]) / samples))]


def read(reduced: Sequence[Sequence[Any]]) -> list[Stats]:
    """Return the numbers of every group of reduced tensors. Sync: one a device."""
    places: dict[str, list[tuple[int, Any]]] = {}
    for index, group in enumerate(reduced):
        for tensor in group:
            places.setdefault(tensor.device, []).append((index, tensor))
    rows: list[list[Any]] = [[] for _ in reduced]
    with unwatched(), record.stop_recording():
        for entries in places.values():
            for (index, _), row in zip(entries, tf.stack([tensor for _, tensor in entries]).numpy(), strict=True):
                rows[index].append(row)
    return [_join(group) for group in rows]


def _join(rows: list[Any]) -> Stats:
    if not rows:
        return Stats()
    table = np.stack(rows)
    elements, nonfinite, nan, zeros, flushed, overflowed = (int(total) for total in table[:, :6].sum(0))
    finite, nonzero = nonfinite < elements, nonfinite + zeros < elements
    lowest = int(table[:, 8].min())
    return Stats(
        elements=elements,
        nonfinite=nonfinite,
        nan=nan,
        zeros=zeros,
        largest=_number(int(table[:, 6].max())) if finite else 0.0,
        smallest=_number(int(table[:, 7].min())) if nonzero else 0.0,
        lowest=math.copysign(_number(abs(lowest)), lowest) if finite else 0.0,
        flushed=flushed,
        overflowed=overflowed,
    )


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
    half_step = 2.0 ** (math.frexp(form.largest)[1] - form.bits - 1)
    beyond = _bits(form.largest + half_step)  # as near to the largest number as to what would come next
    # Ties go to the even number: up where the last bit of the largest is 1, as where there are infinities.
    return _bits(form.smallest / 2), beyond - 1 if form.infinite else beyond


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
            tf.size(bits, tf.int64),
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
