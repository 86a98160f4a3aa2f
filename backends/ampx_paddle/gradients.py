"""Gradients of an optimizer: collect, unscale and check, clip."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle.nn.clip import get_tensor_from_selected_rows, merge_selected_rows

from ampx.errors import UnsupportedByBackendError


def parameters(optimizer: Any) -> list[paddle.Tensor]:
    """List the trainable parameters of a raw optimizer, in order. Sync: none."""
    listed = optimizer._param_groups or []
    flat = [one for entry in listed for one in (entry["params"] if isinstance(entry, dict) else (entry,))]
    return [one for one in flat if not one.stop_gradient]


def collect(optimizer: Any) -> list[paddle.Tensor]:
    """List the parameters that have a gradient; `gradient_of` gives it. Sync: none."""
    return [parameter for parameter in parameters(optimizer) if gradient_of(parameter) is not None]


def gradient_of(parameter: paddle.Tensor) -> paddle.Tensor | None:
    """Give the gradient that Paddle's optimizers would apply; None without. Sync: none."""
    main = getattr(parameter, "main_grad", None)  # the float32 gradient of a low-precision parameter
    return parameter._grad_ivar() if main is None else main


def any_nonzero(found: Sequence[paddle.Tensor]) -> bool:
    """Tell whether a gradient is more than the zeros that `clear_grad` leaves behind. Sync: one a gradient."""
    return any(bool(values.astype("bool").any()) for values in _values(found))


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
    sparse: list[tuple[paddle.Tensor, paddle.Tensor]] = []
    for parameter in found:
        gradient = gradient_of(parameter)
        if gradient.is_selected_rows():
            # Native defect: on the CPU the kernel kills the process when it meets sparse rows. It gets a dense copy
            # of the values, for the test; the rows themselves are scaled below.
            sparse.append((parameter, gradient))
            gradient = get_tensor_from_selected_rows(gradient)
        elif not gradient.is_dense():
            raise UnsupportedByBackendError(
                f"parameter {parameter.name!r} has a gradient that is neither dense nor SelectedRows, which Paddle "
                f"cannot unscale; accepted: these two. Compute this parameter's gradient densely."
            )
        batches.setdefault((gradient.dtype, str(gradient.place)), []).append(gradient)
    finite = True
    for (dtype, place), batch in batches.items():
        overflow = _unscale_dense(batch, _scalar(scale, "float64" if dtype == paddle.float64 else "float32", place))
        finite = finite and not overflow
    if scale < 1.0 and finite:
        # Paddle's kernel tests before it divides, and dividing by less than one may overflow.
        finite = all(bool(paddle.isfinite(one).all()) for batch in batches.values() for one in batch)
    for parameter, gradient in sparse:
        parameter._set_grad_ivar(paddle.scale(gradient, 1.0 / scale))
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
def _scalar(scale: float, dtype: str, place: str) -> paddle.Tensor:
    """Give the scale as a tensor; made once, because scales change rarely. The place is part of the key only."""
    return paddle.full([1], scale, dtype)


def _values(found: Sequence[paddle.Tensor]) -> Iterator[paddle.Tensor]:
    """Walk over the gradients' values as dense tensors; several rows of one sparse gradient are added first."""
    for parameter in found:
        gradient = gradient_of(parameter)
        if gradient.is_selected_rows():
            yield get_tensor_from_selected_rows(merge_selected_rows(gradient))
        else:
            yield gradient.detach()  # shares memory, and may be written to


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
    if max_value is not None:
        for parameter in found:
            gradient = gradient_of(parameter)
            if gradient.is_selected_rows():
                parameter._set_grad_ivar(paddle.clip(merge_selected_rows(gradient), -max_value, max_value))
            else:
                gradient.detach().clip_(-max_value, max_value)
    if max_norm is None:
        return None
    squares = [values.astype("float32").square().sum() for values in _values(found)]
    norm = paddle.add_n(squares).sqrt() if squares else paddle.zeros([])
    # Exactly 1 where the bound is not reached, so that such gradients stay bit for bit.
    factor = paddle.where(norm > max_norm, max_norm / norm, paddle.ones_like(norm))
    for parameter in found:
        gradient = gradient_of(parameter)
        if gradient.is_selected_rows():
            parameter._set_grad_ivar(paddle.scale(gradient, factor))
        else:
            gradient.detach().multiply_(factor.astype(gradient.dtype))
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
    found = collect(optimizer)
    for parameter, values in zip(found, _values(found), strict=True):
        bad = int((~paddle.isfinite(values)).astype("int64").sum())
        if bad:
            result.append((names.get(id(parameter), parameter.name), bad, int(parameter.size)))
    return result
