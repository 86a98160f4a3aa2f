"""Look at a loss and scale it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import paddle

from ampx.backend import LossInfo
from ampx.errors import LossDtypeError

from .writes import watch_loss


def inspect_loss(loss: Any, check_nan: bool | None) -> LossInfo:
    """Return what `scale_loss` has to know about a loss, a tensor of any shape, dtype and place.

    Sync: none unless `check_nan` is True and the loss is on an accelerator.
    """
    if isinstance(loss, paddle.pir.Value):
        raise LossDtypeError(
            "scale_loss got a value of a static graph; accepted: eager tensors. Under enable_static call "
            "opt.minimize(loss), which scales the loss itself; under to_static put the model into the graph, not the "
            "training step, or leave full_graph=False."
        )
    if not isinstance(loss, paddle.Tensor):
        raise LossDtypeError(
            f"scale_loss got a loss of type {type(loss).__name__}; accepted: a paddle tensor. Pass the tensor that the "
            f"loss function returned, not loss.item()."
        )
    elements, dtype = math.prod(loss.shape), loss.dtype  # Tensor.size takes much longer
    name = "float32" if dtype is paddle.float32 else str(dtype).removeprefix("paddle.")  # slow to compare, and to name
    floating = dtype is paddle.float32 or bool(loss.is_floating_point())
    nan: bool | None = None
    if elements == 1 and floating and check_nan is not False and (check_nan or loss.place.is_cpu_place()):
        value = loss.item()
        nan = value != value
    return LossInfo(elements, name, floating, not loss.stop_gradient, nan)


def watch_backward(loss: paddle.Tensor, scaled: paddle.Tensor) -> Callable[[], bool | None]:
    """Return a function that returns through which of the two a backward went."""
    loss.retain_grads()
    scaled.retain_grads()

    def answer() -> bool | None:
        return scaled.grad is not None or (None if loss.grad is None else False)

    return answer


def scale_loss(loss: paddle.Tensor, scale: float) -> paddle.Tensor:
    """Return the loss in float32 times the scale; in float16 the product would overflow.

    Native defect: `GradScaler.scale` also looks at the dtype of the last `auto_cast` anywhere in the process and
    switches itself off for good unless it was float16. Nothing but the scale counts here.
    """
    if loss.dtype is not paddle.float32 and loss.dtype in (paddle.float16, paddle.bfloat16):
        loss = loss.astype("float32")
    scaled = loss * scale
    watch_loss(scaled, scale)
    return scaled
