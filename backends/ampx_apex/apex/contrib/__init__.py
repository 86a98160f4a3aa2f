"""What `apex.contrib` had that is plain PyTorch: `xentropy`, `clip_grad` and `layer_norm`.

Its `optimizers` are those of `apex.optimizers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm_

from ampx_apex.apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, fused_layer_norm_affine

__all__ = ["FastLayerNorm", "FastLayerNormFN", "SoftmaxCrossEntropyLoss", "clip_grad_norm_"]


class SoftmaxCrossEntropyLoss:
    """Cross entropy with smoothed labels, called as an autograd function of torch."""

    @staticmethod
    def forward(
        ctx: None,
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> torch.Tensor:
        """Compute the loss of each row in float32; rows labelled `padding_idx` have the loss 0.

        The losses have the logits' dtype, or float32 with `half_to_float`.
        """
        options: Any = {"ignore_index": padding_idx, "label_smoothing": smoothing, "reduction": "none"}
        with torch.autocast(logits.device.type, enabled=False):
            wide = logits if logits.dtype == torch.float64 else logits.float()
            losses = functional.cross_entropy(wide, labels, **options)
        return losses if half_to_float else losses.to(logits.dtype)

    @classmethod
    def apply(cls, *args: Any) -> torch.Tensor:
        """Do as `forward`, without its first argument."""
        return cls.forward(None, *args)


class FastLayerNormFN:
    """`FusedLayerNormAffineFunction` without a shape: the weight has it."""

    @staticmethod
    def forward(
        ctx: None,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        """Normalise."""
        return FusedLayerNormAffineFunction.apply(x, gamma, beta, gamma.shape, epsilon, memory_efficient)

    @classmethod
    def apply(cls, *args: Any) -> torch.Tensor:
        """Do as `forward`, without its first argument."""
        return cls.forward(None, *args)


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimension, like `apex.normalization.FusedLayerNorm`."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        shape = self.weight.shape
        return fused_layer_norm_affine(x, self.weight, self.bias, shape, self.epsilon, self.memory_efficient)
