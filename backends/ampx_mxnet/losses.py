"""Look at a loss and scale it."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

import numpy as np

from ampx.backend import LossInfo
from ampx.errors import DetachedLossError, LossDtypeError, UnsupportedByBackendError

from .compat import mx
from .dtypes import FLOATING, cast_tensor, name_of

_LIBRARY: Final = mx.base._LIB
_new_empty_handle = mx.ndarray.ndarray._new_empty_handle


def inspect_loss(loss: Any, check_nan: bool | None) -> LossInfo:
    """Return what `scale_loss` has to know about a loss, a vector too: gluon's losses have one element a sample.

    Sync: one where `check_nan` is True, and only then NaN is looked for: MXNet computes asynchronously on the CPU too.
    """
    if not isinstance(loss, mx.nd.NDArray):
        raise LossDtypeError(
            f"scale_loss got a loss of type {type(loss).__name__}; accepted: an MXNet array. Pass the array that the "
            f"loss function returned, not loss.asscalar() and no symbol."
        )
    dtype = name_of(loss.dtype)  # MXNet asks its library each time
    floating = dtype in FLOATING
    nan = bool(np.isnan(cast_tensor(loss, "float32").asnumpy()).any()) if check_nan and floating else None
    if floating and not _is_recorded(loss):
        raise DetachedLossError(
            "scale_loss got a loss that was not recorded, so that no gradient can flow from it (it was computed "
            "outside of autograd.record(), or is detached, or its backward has run already); accepted: a loss computed "
            "from the parameters inside `with autograd.record():`. Remove detach() or autograd.pause() around it, or "
            "compute it there."
        )
    return LossInfo(math.prod(loss.shape), dtype, floating, True, nan)


def _is_recorded(loss: Any) -> bool:
    """Return whether an array is part of a recorded graph, which MXNet tells by whether it has a symbol for it."""
    symbol = ctypes.c_void_p()
    if _LIBRARY.MXAutogradGetSymbol(loss.handle, ctypes.byref(symbol)):
        return False
    _LIBRARY.MXSymbolFree(symbol)
    return True


def check_second_derivative(error: Exception) -> None:
    """Raise an error that says what to do where MXNet's is that its casts have no second derivative."""
    if "_backward_amp_cast is non-differentiable" in str(error):
        raise UnsupportedByBackendError(
            "the loss holds gradients (autograd.grad with create_graph=True) of what was cast to low precision, and "
            "MXNet's casts have no second derivative; accepted: such gradients of what is computed in float32. Put the "
            "forward that they come from, and autograd.grad, into `with ampx.autocast(enabled=False):`."
        ) from error


def scale_loss(loss: Any, scale: float) -> Any:
    """Return the loss in float32 times the scale; in float16 the product would overflow.

    Native defect: outside `autograd.record()` MXNet does not record the multiplication, and backward then raises.
    So it is recorded here wherever it stands.
    """
    if mx.autograd.is_recording():
        return _scaled(loss, scale)
    with mx.autograd.record(train_mode=mx.autograd.is_training()):
        return _scaled(loss, scale)


def _scaled(loss: Any, scale: float) -> Any:
    if name_of(loss.dtype) in ("float16", "bfloat16"):
        loss = cast_tensor(loss, "float32")
    if isinstance(loss, mx.np.ndarray):
        return loss * scale
    return mx.nd._internal._mul_scalar(loss, scalar=scale, out=ScaledLoss(_new_empty_handle()))


class ScaledLoss(mx.nd.NDArray):
    """An array that can be referred to weakly, as MXNet's cannot: so a loss that is scaled twice is noticed."""

    __slots__ = ("__weakref__",)
