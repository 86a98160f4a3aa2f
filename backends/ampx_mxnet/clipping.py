"""Clip true gradients in place."""

from __future__ import annotations

from typing import Any

from .compat import mx
from .gradients import CHUNK


def clip(gradients: list[dict[str, list[Any]]], max_norm: float | None, max_value: float | None) -> Any:
    """Clip true gradients in place by value, then by global L2 norm.

    Every context is clipped by the norm of its own gradients: where the trainer reduces them, all contexts hold the
    same; where it does not, every context trains a model of its own.

    Args:
        gradients: What `gradients.collect` gave.
        max_norm: Bound of the norm, or None.
        max_value: Bound of every element, or None.

    Returns:
        The first context's norm before clipping by norm, a float32 array of one element that `float` reads; None where
        `max_norm` is None.

    Sync: none; one a context that has sparse gradients, where `max_norm` is given.
    """
    norms = []
    with mx.autograd.pause():
        for batches in gradients:
            every = [(kind, one) for kind, batch in batches.items() for one in batch]
            if max_value is not None:
                for _, one in every:
                    mx.nd.clip(one, -max_value, max_value, out=one)
            if max_norm is not None and every:
                norms.append(_clip_context(batches, every, max_norm))
    if max_norm is None:
        return None
    return norms[0].reshape(()).as_np_ndarray() if norms else mx.np.zeros(())


def _clip_context(batches: dict[str, list[Any]], every: list[tuple[str, Any]], max_norm: float) -> Any:
    norm = mx.nd.add_n(*_squares(batches)).sqrt()
    # Exactly 1 where the bound is not reached, so that such gradients stay bit for bit.
    factor = mx.nd.where(norm > max_norm, max_norm / norm, mx.nd.ones_like(norm))
    for kind, one in every:
        if kind == "row_sparse":  # no kernel multiplies sparse rows by an array
            mx.nd._internal._mul_scalar(one, scalar=float(factor.asscalar()), out=one)
        else:
            mx.nd.broadcast_mul(one, factor.astype(one.dtype).reshape((1,) * one.ndim), out=one)
    return norm


def _squares(batches: dict[str, list[Any]]) -> list[Any]:
    """List sums of squares, each a float32 array of one element."""
    sums: list[Any] = []
    for kind, batch in batches.items():
        if kind == "row_sparse":
            sums.extend(mx.nd.norm(one).square().reshape((1,)).astype("float32") for one in batch)
        elif kind == "float32":
            for start in range(0, len(batch), CHUNK):
                chunk = batch[start : start + CHUNK]
                sums.append(mx.nd.multi_sum_sq(*chunk, num_arrays=len(chunk)).sum())
        else:
            sums.extend(one.astype("float32").square().sum() for one in batch)
    return sums
