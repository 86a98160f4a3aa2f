"""Lists of gradients, dense or sparse, with None where there is none: unscale, check, clip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import tensorflow as tf

from ampx.backend import Array
from ampx.formats import stride
from ampx.rooms import METER_SAMPLES

from . import casting
from .contexts import compiles

if TYPE_CHECKING:
    from ampx.numerics.host_meter import Sampled

# Gradients of at most so many elements are tested together: looking at each costs more than moving them to one place.
# Not under XLA, which looks up for every element in which gradient it is.
_SMALL: Final = 4096
LOW: Final = tuple(casting.DTYPES[name] for name in casting.LOW)


def unscale(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Divide gradients by a float32 scalar, in float32 or wider; their dtypes stay. None divides by nothing."""
    if scale is None:
        return list(grads)

    # TensorFlow's rewriter of graphs moves RealDiv to float16 where it follows a product: there a scale of 2**16 is
    # infinite, and the gradients become 0. It leaves Div alone, which computes the same.
    def divide(values: Any) -> Any:
        if values.dtype in LOW:
            return tf.cast(tf.raw_ops.Div(x=tf.cast(values, tf.float32), y=scale), values.dtype)
        return tf.raw_ops.Div(x=values, y=tf.cast(scale, values.dtype))

    return each(divide, grads)


def widen(grads: Sequence[Any]) -> list[Any]:
    """Return low-precision gradients in float32, in which they can be divided without flushing to zero."""
    return each(lambda values: tf.cast(values, tf.float32) if values.dtype in LOW else values, grads)


def name(variable: Any) -> str:
    """Return the name of a variable of Keras or TensorFlow."""
    return str(getattr(variable, "path", variable.name))


def nonfinite(grads: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, int]]:
    """List the variables with non-finite gradients, and how many elements of these are. Sync: one a gradient."""
    rows = []
    for grad, variable in zip(grads, variables, strict=True):
        for values in () if grad is None else _floating([grad]):
            bad = int(tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(values)), tf.int64)))
            if bad:
                rows.append((variable, bad))
    return rows


def meter_samples(grads: Sequence[Any], variables: Sequence[Any], gradients: bool) -> list[Sampled]:
    """Sample variables and their dense gradients, for the meter. Sync: one for each of them."""
    from ampx.numerics.host_meter import Sampled  # it may have been taken out; nothing is metered then

    sampled = []
    for grad, variable in zip(grads, variables, strict=True):
        dense = gradients and grad is not None and not isinstance(grad, tf.IndexedSlices)
        slopes = _sample(tf.cast(grad, tf.float32)) if dense else None
        values = tf.convert_to_tensor(variable)
        sampled.append(Sampled(name(variable), values.dtype.name, _sample(values), slopes))
    return sampled


def sample(
    grads: Sequence[Any], variables: Sequence[Any], samples: int, names: Mapping[int, str]
) -> list[tuple[str, tuple[int, ...], Array | None, Array | None]]:
    """Return name, shape and samples of variables: of the gradient, and of the variable, as they are now.

    They are None for a sparse gradient or none, and for a variable that is not float32.

    Args:
        grads: The gradients.
        variables: The variables.
        samples: So many elements at most.
        names: The names of variables by id.

    Sync: two for each of them.
    """
    sampled = []
    for grad, variable in zip(grads, variables, strict=False):
        dense = grad is not None and not isinstance(grad, tf.IndexedSlices)
        values = _sample(tf.cast(grad, tf.float32), samples) if dense else None
        stored = tf.convert_to_tensor(variable)
        weights = _sample(stored, samples) if stored.dtype == tf.float32 else None
        sampled.append((names[id(variable)], tuple(variable.shape), values, weights))
    return sampled


def _sample(values: Any, samples: int = METER_SAMPLES) -> Any:
    """Return elements; few elements come as they are, because a copy of them takes less than two operations."""
    elements = values.shape.num_elements()
    if elements > samples:
        return tf.reshape(values, [-1])[:: stride(elements, samples)].numpy()
    return values.numpy().reshape(-1).copy()  # the weights' own memory, otherwise


def finite(grads: Sequence[Any]) -> Any:
    """Return whether all gradients are free of inf and NaN, as a boolean scalar tensor."""
    large: list[Any] = []
    small: dict[Any, list[Any]] = {}
    together = _SMALL if not compiles() else -1
    for values in _floating(grads):
        elements = values.shape.num_elements()
        if elements is not None and elements <= together:
            small.setdefault(values.dtype, []).append(tf.reshape(values, [-1]))
        else:
            large.append(values)
    flags = [tf.reduce_all(tf.math.is_finite(values)) for values in large]
    for parts in small.values():
        flags.append(tf.reduce_all(tf.math.is_finite(parts[0] if len(parts) == 1 else tf.concat(parts, 0))))
    if not flags:
        return tf.constant(True)
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


def clip(grads: Sequence[Any], max_norm: float | None, max_value: float | None) -> tuple[list[Any], Any]:
    """Clip unscaled gradients by value, then by global L2 norm; return them and the norm before, or None.

    Rows of `IndexedSlices` that name one row twice are added up first: their sum is what is clipped. The norm is
    float32, and infinite only where float32 cannot hold it.
    """
    merged = [_merge(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
    if max_value is not None:
        merged = each(lambda values: tf.clip_by_value(values, -max_value, max_value), merged)
    if max_norm is None:
        return merged, None
    floating = _floating(merged)
    if not floating:
        return merged, tf.constant(0.0)
    parts = _magnitudes(floating)
    norm = _norm(parts)

    def shrink() -> tuple[list[Any], Any]:
        factor = tf.where(norm > max_norm, max_norm / norm, tf.ones_like(norm))
        return [_times(values, factor) for values in floating], tf.cast(norm, tf.float32)

    # Squares of large elements overflow, though every element is finite; other steps read nothing twice.
    clipped, norm = tf.cond(tf.math.is_finite(norm), shrink, lambda: _shrink_large(floating, parts, max_norm))
    remaining = iter(clipped)
    return each(lambda _: next(remaining), merged), norm


def _magnitudes(floating: Sequence[Any]) -> list[Any]:
    """Return what the norm is computed from: real numbers, in float32 or float64."""
    real = [tf.abs(values) if values.dtype.is_complex else values for values in floating]
    return [values if values.dtype == tf.float64 else tf.cast(values, tf.float32) for values in real]


def _norm(parts: Sequence[Any]) -> Any:
    wide = _widest(parts)
    return tf.sqrt(tf.add_n([tf.cast(tf.reduce_sum(tf.square(values)), wide) for values in parts]))


def _widest(parts: Sequence[Any]) -> Any:
    return tf.float64 if tf.float64 in [values.dtype for values in parts] else tf.float32


def _times(values: Any, *factors: Any) -> Any:
    wide = tf.float32 if values.dtype in LOW else values.dtype
    product = tf.cast(values, wide)
    for factor in factors:
        product *= tf.cast(factor, wide)
    return tf.cast(product, values.dtype)


def _shrink_large(floating: Sequence[Any], parts: Sequence[Any], max_norm: float) -> tuple[list[Any], Any]:
    """Clip by a norm whose square overflows: it is computed from elements times a factor that makes them small."""
    wide = _widest(parts)
    largest = tf.reduce_max(tf.stack([tf.cast(tf.reduce_max(tf.abs(values)), wide) for values in parts]))
    small = 16.0 / largest  # 1 / largest may be too small for float32
    norm = _norm([_times(values, small) for values in parts])
    clips = norm > max_norm * small
    factor = max_norm / norm
    clipped = [tf.where(clips, _times(values, small, factor), values) for values in floating]
    return clipped, tf.cast(norm / small, tf.float32)


def _floating(grads: Sequence[Any]) -> list[Any]:
    """Return the values of the gradients that are floating or complex."""
    every = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads if grad is not None]
    return [values for values in every if values.dtype.is_floating or values.dtype.is_complex]


def each(function: Callable[[Any], Any], grads: Sequence[Any]) -> list[Any]:
    """Apply a function to the floating values of each gradient; None stays."""
    changed = []
    for grad in grads:
        sparse = isinstance(grad, tf.IndexedSlices)
        values = grad.values if sparse else grad
        if values is None or not (values.dtype.is_floating or values.dtype.is_complex):
            changed.append(grad)
        elif sparse:
            changed.append(tf.IndexedSlices(function(values), grad.indices, grad.dense_shape))
        else:
            changed.append(function(values))
    return changed


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
