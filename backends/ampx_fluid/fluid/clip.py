"""`fluid.clip`: what optimizers take as `grad_clip`."""

from __future__ import annotations

from paddle.nn import (
    ClipGradByGlobalNorm as GradientClipByGlobalNorm,
    ClipGradByNorm as GradientClipByNorm,
    ClipGradByValue as GradientClipByValue,
)

from .missing import refuse_missing

__all__ = ["GradientClipByGlobalNorm", "GradientClipByNorm", "GradientClipByValue"]

__getattr__ = refuse_missing(__name__)
