"""A learning-rate scheduler that waits for skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .events import StepResult


class Gate:
    """Delegates to a scheduler; `step` does nothing after a skipped optimizer step."""

    def __init__(self, scheduler: Any, last_steps: Sequence[Callable[[], StepResult | None]]) -> None:
        """Remember whom to ask; the scheduler is not touched."""
        self.scheduler = scheduler
        self._last_steps = tuple(last_steps)

    def __getattr__(self, name: str) -> Any:
        """Look everything else up on the scheduler."""
        if name.startswith("__") or "scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> bool:
        """Step the scheduler if every optimizer's last step was applied.

        Returns:
            Whether the scheduler stepped.

        Sync: one where the scale lives on the device, else none.
        """
        results = [last_step() for last_step in self._last_steps]
        applied = all(result is not None and result.applied for result in results)
        if applied:
            self.scheduler.step(*args, **kwargs)
        return applied
