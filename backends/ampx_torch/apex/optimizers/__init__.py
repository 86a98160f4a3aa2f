"""`apex.optimizers`: the fused optimizers, on torch's fused and foreach kernels."""

from __future__ import annotations

from .fused_adagrad import FusedAdagrad as FusedAdagrad
from .fused_adam import FusedAdam as FusedAdam
from .fused_lamb import FusedLAMB as FusedLAMB
from .fused_novograd import FusedNovoGrad as FusedNovoGrad
from .fused_sgd import FusedSGD as FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
