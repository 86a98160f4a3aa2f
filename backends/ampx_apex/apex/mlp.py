"""`apex.mlp`: linear layers in a row, each followed by its activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from ampx.errors import InvalidOptionError

_ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}


class MLP(nn.Module):
    """Linear layers, each followed by its activation, which is `"none"`, `"relu"` or `"sigmoid"`."""

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise InvalidOptionError(
                f"MLP(activation={activation!r}) is not accepted; accepted: {', '.join(map(repr, _ACTIVATIONS))}. Pass "
                f"one of these."
            )
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(self.mlp_sizes) - 1
        self.bias = bias
        self.activation = activation
        for layer in range(self.num_layers):
            features = (self.mlp_sizes[layer + 1], self.mlp_sizes[layer])
            self.register_parameter(f"weight_{layer}", nn.Parameter(torch.empty(features)))
            if bias:
                self.register_parameter(f"bias_{layer}", nn.Parameter(torch.empty(features[0])))
        self.reset_parameters()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights, layer by layer."""
        return [self.get_parameter(f"weight_{layer}") for layer in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """The biases, layer by layer; none without them."""
        return [self.get_parameter(f"bias_{layer}") for layer in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / len(bias)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        activate = _ACTIVATIONS[self.activation]
        biases = self.biases or [None] * self.num_layers
        for weight, bias in zip(self.weights, biases, strict=True):
            input = activate(functional.linear(input, weight, bias))
        return input

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.mlp_sizes}, bias={self.bias}, activation={self.activation!r}"
