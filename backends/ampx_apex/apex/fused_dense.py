"""`apex.fused_dense`: a linear layer, and two with a GELU in between."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ampx.errors import InvalidOptionError


class FusedDense(nn.Linear):
    """torch's linear layer, under its old name."""


class FusedDenseGeluDense(nn.Module):
    """A linear layer, the tanh approximation of GELU, a linear layer; `bias` may only be True."""

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise InvalidOptionError(
                "FusedDenseGeluDense(bias=False) is not accepted; accepted: True. Use two torch.nn.Linear(bias=False) "
                "with torch.nn.GELU between them."
            )
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1, self.weight2, self.bias2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        return FusedDenseGeluDenseFunc.apply(input, self.weight1, self.bias1, self.weight2, self.bias2)


class FusedDenseFunc:
    """`torch.nn.functional.linear`, called as an autograd function of torch."""

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Multiply and add."""
        return functional.linear(input, weight, bias)


class DenseNoBiasFunc:
    """`torch.nn.functional.linear` without a bias, called as an autograd function of torch."""

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return functional.linear(input, weight)


class FusedDenseGeluDenseFunc:
    """What `FusedDenseGeluDense` computes, called as an autograd function of torch."""

    @staticmethod
    def apply(
        input: torch.Tensor, weight1: torch.Tensor, bias1: torch.Tensor, weight2: torch.Tensor, bias2: torch.Tensor
    ) -> torch.Tensor:
        """Run the layers."""
        hidden = functional.gelu(functional.linear(input, weight1, bias1), approximate="tanh")
        return functional.linear(hidden, weight2, bias2)


fused_dense_function = FusedDenseFunc.apply
dense_no_bias_function = DenseNoBiasFunc.apply
fused_dense_gelu_dense_function = FusedDenseGeluDenseFunc.apply
