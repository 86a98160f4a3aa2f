"""What a wrapped trainer knows of its gradients between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ampx import optimizer

from .compat import mx
from .low_precision import LowParameter, low_parameters


class PendingGradients(optimizer.PendingGradients):
    """Gradients that wait for a step, and those that a step has used.

    Attributes:
        reduced: The contexts' gradients are added up already.
        left: The scale of those that a step used and that were not cleared since; None where there are none.
    """

    __slots__ = ("_widened", "left", "reduced")

    def __init__(self) -> None:
        super().__init__()
        self.reduced = False
        self.left: float | None = None
        self._widened: list[LowParameter] = []

    def widen(self, parameters: Iterable[Any]) -> None:
        """Have low-precision gradients in float32: divided by the scale, they may be too small for less."""
        self._widened = low_parameters(parameters)
        with mx.autograd.pause():
            for parameter in self._widened:
                parameter.widen_gradients()

    def narrow(self) -> None:
        """Undo `widen`, as far as it came; what hangs on the parameters then is rounded."""
        with mx.autograd.pause():
            while self._widened:
                self._widened[-1].narrow_gradients()
                self._widened.pop()

    def forget(self) -> None:
        """Forget gradients that were used or cleared."""
        self.unscaled = self.norm = None
        self.reduced = False
        if self._widened:
            self.narrow()
