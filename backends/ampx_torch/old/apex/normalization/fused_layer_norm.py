"""The modules of `apex.normalization`, and its functions under the name that scripts import them by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ampx.errors import UnsupportedByBackendError

from .functional import (
    FusedLayerNormAffineFunction as FusedLayerNormAffineFunction,
    FusedLayerNormFunction as FusedLayerNormFunction,
    FusedRMSNormAffineFunction as FusedRMSNormAffineFunction,
    FusedRMSNormFunction as FusedRMSNormFunction,
    Shape,
    fused_layer_norm as fused_layer_norm,
    fused_layer_norm_affine as fused_layer_norm_affine,
    fused_rms_norm as fused_rms_norm,
    fused_rms_norm_affine as fused_rms_norm_affine,
    manual_rms_norm as manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine as mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine as mixed_dtype_fused_rms_norm_affine,
    warn_about_memory,
)


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm that gives the dtype of its input, and the dtype of autocast where that is on.

    Args:
        normalized_shape: The last dimensions of the input.
        eps: Added to the variance.
        elementwise_affine: Whether the module has a weight and a bias.
        memory_efficient: True warns: torch's kernel keeps its input, the result is the same.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        warn_about_memory(memory_efficient)
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        if not self.elementwise_affine:
            return fused_layer_norm(input, self.normalized_shape, self.eps)
        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(nn.RMSNorm):
    """RMS norm that gives the dtype of its input, and the dtype of autocast where that is on.

    Args:
        normalized_shape: The last dimensions of the input.
        eps: Added to the mean square.
        elementwise_affine: Whether the module has a weight.
        memory_efficient: True warns: torch's kernel keeps its input, the result is the same.
    """

    eps: float

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        warn_about_memory(memory_efficient)
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        if not self.elementwise_affine:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer norm that gives the dtype of its weight: a float32 norm in a float16 model gives float32.

    Args:
        normalized_shape: The last dimensions of the input.
        eps: Added to the variance.
        options: `memory_efficient` as in `FusedLayerNorm`; `elementwise_affine` may only be True.

    Raises:
        UnsupportedByBackendError: `elementwise_affine` is False.
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        _refuse_plain("MixedFusedLayerNorm", options)
        super().__init__(normalized_shape, eps, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS norm that gives the dtype of its weight.

    Args:
        normalized_shape: The last dimensions of the input.
        eps: Added to the mean square.
        options: `memory_efficient` as in `FusedRMSNorm`; `elementwise_affine` may only be True.

    Raises:
        UnsupportedByBackendError: `elementwise_affine` is False.
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: Any) -> None:
        _refuse_plain("MixedFusedRMSNorm", options)
        super().__init__(normalized_shape, eps, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


def _shape(normalized_shape: Shape) -> Any:
    return normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)


def _refuse_plain(name: str, options: dict[str, Any]) -> None:
    if not options.get("elementwise_affine", True):
        raise UnsupportedByBackendError(
            f"{name}(elementwise_affine=False) is not accepted: the dtype of its result is that of its weight. Use "
            f"{name.removeprefix('Mixed')}."
        )
