"""Gradients of an optimizer: collect, unscale and check, clip."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle

from ampx.errors import UnsupportedByBackendError


def parameters(optimizer: Any) -> list[paddle.Tensor]:
    """List the trainable parameters of a raw optimizer, in order. Sync: none."""
    listed = optimizer._param_groups or []
    flat = [one for entry in listed for one in (entry["params"] if isinstance(entry, dict) else (entry,))]
    return [one for one in flat if not one.stop_gradient]


def collect(optimizer: Any) -> list[paddle.Tensor]:
    """List the parameters that have a gradient; `gradient_of` gives it. Sync: none."""
    return [parameter for parameter in parameters(optimizer) if gradient_of(parameter) is not None]


def gradient_of(parameter: paddle.Tensor) -> Any:
    """Give the gradient tensor that Paddle's optimizers would apply; None without. Sync: none."""
    main = getattr(parameter, "main_grad", None)  # the float32 gradient of a low-precision parameter
    return parameter._grad_ivar() if main is None else main


def any_nonzero(found: Sequence[paddle.Tensor]) -> bool:
    """Tell whether a gradient is more than the zeros that `clear_grad` leaves behind. Sync: one a gradient."""
    return any(bool(_values(parameter).astype("bool").any()) for parameter in found)


@paddle.no_grad()
def unscale(found: Sequence[paddle.Tensor], scale: float) -> bool:
    """Divide gradients by the scale in place and test them, with Paddle's own kernel, in one call a dtype.

    After an overflow Paddle's kernel leaves zeros and NaN where the gradients were.

    Args:
        found: Parameters that have a gradient, dense or sparse (SelectedRows).
        scale: The scale that the gradients carry.

    Returns:
        Whether all gradients were and are finite.

    Raises:
        UnsupportedByBackendError: A gradient has a dtype or layout that Paddle cannot test here.

    Sync: one a dtype.
    """
    batches: dict[Any, list[paddle.Tensor]] = {}
    last: Any = None
    for parameter in found:
        values = gradient_of(parameter)
        if not values.is_dense() or values.is_selected_rows():
            # Native defect: on the CPU the kernel kills the process when it meets sparse rows. It gets their values.
            values = _values(parameter)
        dtype = values.dtype
        if dtype is not last:  # most are the same, and looking one up is slow
            batch, last = batches.setdefault(dtype, []), dtype
        batch.append(values)
    finite = True
    for dtype, batch in batches.items():
        kind = "float64" if dtype == paddle.float64 else "float32"
        overflow = _unscale_dense(batch, _scalar(scale, kind, str(batch[0].place)))
        finite = finite and not overflow
    if scale < 1.0 and finite:
        # Paddle's kernel tests before it divides, and dividing by less than one may overflow.
        return all(bool(paddle.isfinite(one).all()) for batch in batches.values() for one in batch)
    return finite


def _unscale_dense(batch: list[paddle.Tensor], scale: paddle.Tensor) -> bool:
    if batch[0].place.is_cpu_place() and batch[0].dtype in (paddle.float16, paddle.bfloat16):
        raise UnsupportedByBackendError(
            f"the gradients are {batch[0].dtype} on the CPU, where Paddle has no kernel that tests them; accepted: "
            f"float32 and float64. Keep the parameters in float32."
        )
    _, found = paddle._C_ops.check_finite_and_unscale_(batch, scale)
    return bool(found.item())


@functools.lru_cache(maxsize=32)
def _scalar(scale: float, dtype: Any, place: str) -> paddle.Tensor:
    """Give the scale as a tensor; made once, because scales change rarely. The place is part of the key only."""
    return paddle.full([1], scale, dtype)


def _values(parameter: paddle.Tensor) -> Any:
    """Give the values of a gradient as a dense tensor that shares its memory.

    Raises:
        UnsupportedByBackendError: The gradient is neither dense nor sparse in Paddle's way (SelectedRows).
    """
    gradient = gradient_of(parameter)
    if gradient.is_selected_rows():
        return gradient._get_tensor_from_selected_rows()
    if not gradient.is_dense():
        raise UnsupportedByBackendError(
            f"parameter {parameter.name!r} has a gradient that is neither dense nor SelectedRows, which Paddle cannot "
            f"unscale; accepted: these two. Compute this parameter's gradient densely."
        )
    return gradient.detach()


def _merge_rows(parameter: paddle.Tensor) -> None:
    """Add up the rows that a sparse gradient holds several times: each is one row of the true gradient."""
    gradient = gradient_of(parameter)
    if gradient.is_selected_rows():
        parameter._set_grad_ivar(paddle._C_ops.merge_selected_rows(gradient))


@paddle.no_grad()
def clip(found: Sequence[paddle.Tensor], max_norm: float | None, max_value: float | None) -> paddle.Tensor | None:
    """Clip true gradients in place by value, then by global L2 norm.

    Args:
        found: Parameters that have a gradient.
        max_norm: Bound of the norm, or None.
        max_value: Bound of every element, or None.

    Returns:
        The norm before clipping by norm, a float32 scalar tensor; None where `max_norm` is None.

    Sync: none.
    """
    for parameter in found:
        _merge_rows(parameter)
    gradients = [_values(parameter) for parameter in found]
    if max_value is not None:
        for one in gradients:
            one.clip_(-max_value, max_value)
    if max_norm is None:
        return None
    squares = [one.astype("float32").square().sum() for one in gradients]
    norm = paddle.add_n(squares).sqrt() if squares else paddle.zeros([])
    # Exactly 1 where the bound is not reached, so that such gradients stay bit for bit.
    factor = paddle.where(norm > max_norm, max_norm / norm, paddle.ones_like(norm))
    for one in gradients:
        one.multiply_(factor.astype(one.dtype))
    return norm


def name_nonfinite(optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
    """List (name, non-finite elements, elements) of parameters with non-finite gradients.

    Args:
        optimizer: The raw optimizer.
        model: A layer whose parameter names are told, or None for Paddle's own.

    Sync: one a gradient.
    """
    names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    result = []
    for parameter in collect(optimizer):
        bad = int((~paddle.isfinite(_values(parameter))).astype("int64").sum())
        if bad:
            result.append((names.get(id(parameter), parameter.name), bad, int(parameter.size)))
    return result
