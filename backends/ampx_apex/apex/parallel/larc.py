"""Layer-wise adaptive rates, for any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampx_torch.delegation import DelegatingOptimizer


class LARC(DelegatingOptimizer):
    """Scales every gradient by the ratio of the norms of weight and gradient before the wrapped optimizer's step.

    The weight decay enters the gradient before it is scaled, and so is taken from the wrapped optimizer for the time
    of its step. Gradients of zeros, and weights of zeros, are left as they are. With `clip` the resulting rate is
    bounded by the group's `lr`, else the two are multiplied.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optimizer = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self.optimizer

    def __getstate__(self) -> dict[str, Any]:
        """Return everything, the wrapped optimizer included."""
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, and step the wrapped optimizer; a closure is evaluated before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        with torch.no_grad():
            for group, decay in zip(self.param_groups, decays, strict=True):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._adapt(parameter, parameter.grad, group["lr"], decay)
        try:
            for group in self.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0
            result = self.optimizer.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    def _adapt(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: Any, decay: float) -> None:
        own, new = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(gradient)
        factor = self.trust_coefficient * own / (new + own * decay + self.eps)
        if self.clip:
            factor = (factor / rate).clamp(max=1.0)
        scaled = (own != 0) & (new != 0)
        gradient.add_(parameter * scaled, alpha=decay)
        gradient.mul_(torch.where(scaled, factor, 1.0))
