"""Gradients of parameters, as core's provenance asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from ampx.provenance import GradientSnapshot, Slots

from .gradients import any_nonzero, rescale


class ParameterSlots(Slots):
    """Parameters, each with its gradients on all contexts; MXNet does not count how often these are written."""

    also_unknown: ClassVar[str] = ", or another backward or trainer's step where grad_req='add'"

    def snapshot(self, slots: Iterable[Any]) -> list[GradientSnapshot]:
        """Return each parameter twice: MXNet's arrays cannot be referred to weakly."""
        return [(parameter, None if parameter._grad is None else parameter, None) for parameter in slots]

    def is_zero(self, gradient: Any) -> bool:
        """Return whether a parameter's gradients are zeros. Sync: one a context, until one is not."""
        return not any_nonzero([gradient])

    def divide(self, gradients: Sequence[Any], divisor: float) -> None:
        """Divide the gradients of parameters in place."""
        rescale(gradients, 1.0 / divisor)

    def sharers(self, own: Any, slots: Sequence[Any]) -> tuple[()]:
        """Return none: MXNet itself raises where two trainers wait for one gradient, which is stale for the second."""
        return ()
