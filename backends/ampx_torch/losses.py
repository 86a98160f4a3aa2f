"""Look at a loss and scale it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ampx.backend import LossInfo
from ampx.errors import LossDtypeError


def inspect_loss(loss: Any, check_nan: bool | None) -> LossInfo:
    """Return what `scale_loss` has to know about a loss.

    Args:
        loss: What the user passed; a tensor of any shape, dtype and device is described.
        check_nan: True: look for NaN even if that syncs. None: only on the CPU. False: never.

    Raises:
        LossDtypeError: It is no tensor.

    Sync: none unless `check_nan` is True and the loss is on an accelerator.
    """
    if not isinstance(loss, torch.Tensor):
        raise LossDtypeError(
            f"scale_loss got a loss of type {type(loss).__name__}; accepted: a torch tensor. Pass the tensor that the "
            f"loss function returned, not loss.item()."
        )
    elements = loss.numel()
    floating = loss.is_floating_point()
    nan: bool | None = None
    if elements == 1 and floating and check_nan is not False and (check_nan or loss.is_cpu):
        value = loss.item()
        nan = value != value
    # Only a message would need the name of a floating dtype, and spelling it takes as long as all of the above.
    return LossInfo(elements, "floating" if floating else str(loss.dtype), floating, loss.requires_grad, nan)


def scale_loss(loss: torch.Tensor, scale: Any) -> torch.Tensor:
    """Return the loss in float32 times the scale.

    In float16 the product would overflow long before the gradients do (native defect 4: a one-element 1-d
    float16 loss stays float16 in torch's own scaler).

    Args:
        loss: Floating tensor of one element.
        scale: Python float, or a float32 scalar tensor.

    Sync: none, unless the scale is on an accelerator and the loss is not.
    """
    dtype = loss.dtype
    if dtype is torch.float16 or dtype is torch.bfloat16:
        loss = loss.float()
    if not isinstance(scale, torch.Tensor):
        if scale == 1.0:  # as bfloat16 has it: another tensor of the same value, and no kernel in backward
            return loss.view_as(loss)
        scale = _scalar(scale)
    elif scale.device != loss.device:
        # A copy to the host must be waited for: nobody else would before the product is taken.
        scale = scale.to(device=loss.device, non_blocking=loss.device.type != "cpu")
    return loss * scale


@functools.lru_cache(maxsize=32)
def _scalar(scale: float) -> torch.Tensor:
    """Return a number as a tensor on the host, which torch multiplies by on any device; a Python float costs more."""
    return torch.tensor(scale, dtype=torch.float32)
