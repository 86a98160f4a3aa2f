"""The place where MXNet's trainer asks a loss scaler: after adding up the contexts, before updating."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class OverflowHook:
    """Stands in for MXNet's own scaler during one step.

    Native defect: MXNet's scaler moves the scale one step late, looks at the first context only, and fails on
    parameters of different dtypes. This one asks ampx, and holds no scale.

    Attributes:
        finite: Whether all gradients were finite; True until MXNet has asked.
    """

    def __init__(self, check: Callable[[], bool]) -> None:
        """Remember whom to ask."""
        self._check = check
        self.finite = True

    def has_overflow(self, parameters: Iterable[Any]) -> bool:
        """Tell MXNet whether to skip the update; it passes its parameters. Sync: as the check."""
        self.finite = self._check()
        return not self.finite

    def run(self, trainer: Any, run: Callable[[float, bool], None], batch_size: float, stale: bool) -> bool:
        """Run one step of a raw trainer with this hook in place, and take it away again.

        Args:
            trainer: The raw trainer.
            run: Its `step` or `update`.
            batch_size: As these take it.
            stale: Their `ignore_stale_grad`.

        Returns:
            Whether all gradients were finite.

        Sync: as the check.
        """
        trainer._amp_loss_scaler = self
        try:
            run(batch_size, stale)
        finally:
            del trainer._amp_loss_scaler
        return self.finite
