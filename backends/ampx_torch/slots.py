"""Gradients that hang on parameters, as core's provenance asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from ampx.provenance import GradientSnapshot, Slots

from .gradients import any_nonzero, unscale_


class ParameterSlots(Slots):
    """Parameters; torch counts how often a tensor is written."""

    also_unknown: ClassVar[str] = ", that were there before add_param_group"

    def snapshot(self, slots: Iterable[torch.Tensor]) -> list[GradientSnapshot]:
        """Return the parameters' gradients, and how often they were written."""
        pairs = [(parameter, parameter.grad) for parameter in slots]
        return [(own, gradient, 0 if gradient is None else gradient._version) for own, gradient in pairs]

    def is_zero(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is zeros. Sync: one."""
        return not any_nonzero(gradient)

    def divide(self, gradients: Sequence[torch.Tensor], divisor: Any) -> None:
        """Divide gradients in place, with torch's own kernel."""
        unscale_(gradients, divisor)

    def keep(self, scale: Any) -> Any:
        """Return a scale as it is now: on a device it moves in place."""
        return scale.clone() if isinstance(scale, torch.Tensor) else scale
