"""`apex.optimizers`: the fused optimizers, on torch's fused and foreach kernels."""

from __future__ import annotations

from .fp16_optimizer import FP16_Optimizer as FP16_Optimizer
from .fused_adagrad import FusedAdagrad as FusedAdagrad
from .fused_adam import FusedAdam as FusedAdam
from .fused_lamb import FusedLAMB as FusedLAMB, FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad as FusedNovoGrad
from .fused_sgd import FusedSGD as FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
