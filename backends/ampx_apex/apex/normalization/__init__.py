"""`apex.normalization`: layer norm and RMS norm, on torch's kernels."""

from __future__ import annotations

from .fused_layer_norm import (
    FusedLayerNorm as FusedLayerNorm,
    FusedRMSNorm as FusedRMSNorm,
    MixedFusedLayerNorm as MixedFusedLayerNorm,
    MixedFusedRMSNorm as MixedFusedRMSNorm,
)

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
