"""Gradients as values: divided by the loss scale, checked for inf and NaN, counted, and clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import varying


def unscale(grads: Any, scale: Any, widen: bool = False) -> tuple[Any, Any]:
    """Divide floating gradients by the scale, in float32 or wider; return them, and whether all are finite.

    With `widen` they stay as wide as that, else they get their own dtypes again.
    """

    def divide(leaf: Any) -> Any:
        if not _is_inexact(leaf):
            return leaf
        dtype = jnp.result_type(leaf)
        true = leaf.astype(jnp.promote_types(dtype, jnp.float32)) / scale
        finite.append(_is_finite(true))
        return true if widen else true.astype(dtype)

    finite: list[Any] = []
    return jax.tree.map(divide, grads), functools.reduce(jnp.logical_and, finite, jnp.array(True))


def all_finite(grads: Any) -> Any:
    """Return whether no gradient has an element that is not finite."""
    return unscale(grads, jnp.float32(1.0))[1]


def _is_finite(leaf: Any) -> Any:
    """Return whether all elements are finite: whether the bits of the largest of either sign are those of a number.

    Two numbers at once, since XLA makes one loop of that, which reads the gradient and divides it. A single sum or
    maximum it cuts up on CPUs, into up to five loops with arrays in between.
    """
    if jnp.iscomplexobj(leaf):
        return _is_finite(leaf.real) & _is_finite(leaf.imag)
    signed, unsigned = (np.int64, np.uint64) if leaf.dtype.itemsize == 8 else (np.int32, np.uint32)
    limits = [np.asarray(sign * np.inf, leaf.dtype).view(kind)[()] for sign, kind in ((1, signed), (-1, unsigned))]
    # As signed integers all negative numbers are less than the positive ones, and as unsigned ones greater.
    largest = jax.lax.reduce(
        tuple(jax.lax.bitcast_convert_type(leaf, kind) for kind in (signed, unsigned)),
        (signed(np.iinfo(signed).min), unsigned(0)),
        _larger,
        tuple(range(leaf.ndim)),
    )
    return (largest[0] < limits[0]) & (largest[1] < limits[1])


def _larger(numbers: Any, others: Any) -> Any:
    # JAX keeps what it compiled as long as the function stays the same.
    return tuple(map(jnp.maximum, numbers, others))


def count_nonfinite(grads: Any) -> Any:
    """Return how many elements of each gradient are not finite: int32, one number a gradient."""
    return jnp.stack([_count_nonfinite(leaf) for leaf in jax.tree.leaves(grads)])


def _count_nonfinite(leaf: Any) -> Any:
    """Return how many elements are not finite, of one row at most 2**24."""
    if not _is_inexact(leaf):
        return jnp.int32(0)
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    rows = jnp.sum((~jnp.isfinite(leaf)).astype(jnp.float32), axis=-1 if jnp.ndim(leaf) else None)
    return jnp.sum(rows.astype(jnp.int32))


def _is_inexact(leaf: Any) -> bool:
    # jax.grad(..., allow_int=True) gives gradients of dtype float0, which is a kind of bool.
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def clip(grads: Any, max_norm: float | None, max_value: float | None) -> tuple[Any, Any]:
    """Clip unscaled gradients by value, then by global L2 norm; return them and the norm before, or None.

    The norm is float32, and infinite only where float32 cannot hold it.
    """

    def each(function: Callable[[Any], Any], tree: Any) -> Any:
        return jax.tree.map(lambda leaf: function(leaf) if _is_inexact(leaf) else leaf, tree)

    if max_value is not None:
        grads = each(lambda leaf: jnp.clip(leaf, -max_value, max_value), grads)
    if max_norm is None:
        return grads, None
    leaves = [leaf for leaf in jax.tree.leaves(grads) if _is_inexact(leaf)]
    plain = _norm(leaves, jnp.float32(1.0))

    def shifted() -> tuple[Any, Any]:
        # Squares of large elements overflow, though every element is finite. 16: the quotient must not underflow.
        shift = 16.0 / _largest(leaves)
        return shift, _norm(leaves, shift)

    shift, norm = varying.switch(
        jnp.isfinite(plain).astype(jnp.int32), [shifted, lambda: (jnp.ones_like(plain), plain)]
    )
    factor = jnp.where(plain > max_norm, max_norm / norm, 1.0)
    clipped = each(lambda leaf: (leaf * shift * factor).astype(leaf.dtype), grads)
    return clipped, (norm / shift).astype(jnp.float32)


def _norm(leaves: list[Any], factor: Any) -> Any:
    """Return the L2 norm over all leaves times a factor, in float32 or wider."""
    total = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) * factor
        total = total + jnp.sum(jnp.real(leaf * jnp.conj(leaf)))
    return jnp.sqrt(total)


def _largest(leaves: list[Any]) -> Any:
    """Return the largest magnitude over all leaves, in float32 or wider."""
    largest = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(leaf), initial=0))
    return largest
