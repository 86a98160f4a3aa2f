"""Lists of gradients, dense or sparse, with None where there is none: unscale, check, clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf

# Gradients of at most so many elements are tested together: looking at each costs more than moving them to one place.
_SMALL: Final = 4096


def present(grads: Sequence[Any]) -> bool:
    """Return whether there is any gradient at all."""
    return any(grad is not None for grad in grads)


def unscale(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Divide gradients by the scale, in float32 or wider; their dtypes stay.

    Args:
        grads: Tensors, `IndexedSlices` or None.
        scale: Float32 scalar; None gives the gradients as they are.
    """
    if scale is None:
        return list(grads)

    def divide(values: Any) -> Any:
        if values.dtype in (tf.float16, tf.bfloat16):
            return tf.cast(tf.cast(values, tf.float32) / scale, values.dtype)
        return values / tf.cast(scale, values.dtype)

    return [_each(divide, grad) for grad in grads]


def finite(grads: Sequence[Any]) -> Any:
    """Return whether all gradients are free of inf and NaN, as a boolean scalar tensor."""
    values = [one for one in map(_values, grads) if _floating(one)]
    parts: list[Any] = []
    small: dict[Any, list[Any]] = {}
    for one in values:
        elements = one.shape.num_elements()
        if elements is not None and elements <= _SMALL:
            small.setdefault(one.dtype, []).append(tf.reshape(one, [-1]))
        else:
            parts.append(one)
    parts += [ones[0] if len(ones) == 1 else tf.concat(ones, 0) for ones in small.values()]
    flags = [tf.reduce_all(tf.math.is_finite(one)) for one in parts]
    if not flags:
        return tf.constant(True)
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


def clip(grads: Sequence[Any], max_norm: float | None, max_value: float | None) -> tuple[list[Any], Any]:
    """Clip true gradients by value, then by global L2 norm.

    Rows of `IndexedSlices` that name one row twice are added up first: their sum is what is clipped.

    Returns:
        The clipped gradients, and the float32 norm before clipping by norm (None where `max_norm` is None; infinite
        only where float32 cannot hold the norm).
    """
    merged = [_merge(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
    if max_value is not None:
        merged = [_each(lambda values: tf.clip_by_value(values, -max_value, max_value), grad) for grad in merged]
    if max_norm is None:
        return merged, None
    floating = [one for one in map(_values, merged) if _floating(one)]
    if not floating:
        return merged, tf.constant(0.0)
    parts = [_magnitudes(one) for one in floating]
    norm = _norm(parts)

    def shrink() -> tuple[list[Any], Any]:
        factor = tf.where(norm > max_norm, max_norm / norm, tf.ones_like(norm))
        return [_times(one, factor) for one in floating], tf.cast(norm, tf.float32)

    # Squares of large elements overflow, though every element is finite; other steps read nothing twice.
    clipped, norm = tf.cond(tf.math.is_finite(norm), shrink, lambda: _shrink_large(floating, parts, max_norm))
    remaining = iter(clipped)
    return [_each(lambda _: next(remaining), grad) for grad in merged], norm


def _magnitudes(values: Any) -> Any:
    """Return what the norm is computed from: real numbers, in float32 or wider."""
    values = tf.abs(values) if values.dtype.is_complex else values
    return values if values.dtype == tf.float64 else tf.cast(values, tf.float32)


def _norm(parts: Sequence[Any]) -> Any:
    wide = _widest(parts)
    return tf.sqrt(tf.add_n([tf.cast(tf.reduce_sum(tf.square(one)), wide) for one in parts]))


def _widest(parts: Sequence[Any]) -> Any:
    return tf.float64 if any(one.dtype == tf.float64 for one in parts) else tf.float32


def _times(values: Any, *factors: Any) -> Any:
    wide = tf.float32 if values.dtype in (tf.float16, tf.bfloat16) else values.dtype
    product = tf.cast(values, wide)
    for factor in factors:
        product *= tf.cast(factor, wide)
    return tf.cast(product, values.dtype)


def _shrink_large(floating: Sequence[Any], parts: Sequence[Any], max_norm: float) -> tuple[list[Any], Any]:
    """Clip values by a norm whose square overflows: it is computed from elements times a factor that makes them small.

    Returns:
        As `clip`.
    """
    wide = _widest(parts)
    largest = tf.reduce_max(tf.stack([tf.cast(tf.reduce_max(tf.abs(one)), wide) for one in parts]))
    small = 16.0 / largest  # 1 / largest may be too small for float32
    norm = _norm([_times(one, small) for one in parts])
    clips = norm > max_norm * small
    factor = max_norm / norm
    return [tf.where(clips, _times(one, small, factor), one) for one in floating], tf.cast(norm / small, tf.float32)


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _floating(values: Any) -> bool:
    return values is not None and bool(values.dtype.is_floating or values.dtype.is_complex)


def _each(function: Callable[[Any], Any], grad: Any) -> Any:
    """Apply a function to a gradient's floating values."""
    if not _floating(_values(grad)):
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


def _merge(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up the rows that name the same row; shapes stay, so that it compiles: rows left over are zero."""
    order = tf.argsort(grad.indices, stable=True)
    indices, values = tf.gather(grad.indices, order), tf.gather(grad.values, order)
    new = tf.concat([[0], tf.cast(indices[1:] != indices[:-1], tf.int32)], 0)
    segments = tf.cumsum(new)
    rows = tf.shape(indices)[0]
    summed = tf.math.unsorted_segment_sum(values, segments, rows)
    owners = tf.math.unsorted_segment_max(indices, segments, rows)
    owners = tf.where(tf.range(rows) <= segments[-1:], owners, tf.zeros_like(owners))
    return tf.IndexedSlices(summed, owners, grad.dense_shape)
