"""Schedulers and averages of weights that wait for skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from .errors import InvalidOptionError
from .events import StepResult

_VERBS: Final = ("step", "update", "update_parameters")


class Gate:
    """Delegates to a scheduler or to an average of weights; its verbs do nothing after a skipped optimizer step."""

    def __init__(self, scheduler: Any, last_steps: Sequence[Callable[[], StepResult | None]]) -> None:
        """Remember whom to ask; the scheduler is not touched.

        Raises:
            InvalidOptionError: There is nothing to wait with.
        """
        if not any(hasattr(scheduler, verb) for verb in _VERBS):
            raise InvalidOptionError(
                f"gate got {type(scheduler).__name__}, which has none of {', '.join(_VERBS)}; accepted: a scheduler, "
                f"an average of weights, or another object with one of these methods. Pass the object itself."
            )
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
        return self._pass_on(self.scheduler.step, args, kwargs)

    def update(self, *args: Any, **kwargs: Any) -> bool:
        """Call `update`, the verb of most averages, as `step` does. Sync: as `step`."""
        return self._pass_on(self.scheduler.update, args, kwargs)

    def update_parameters(self, *args: Any, **kwargs: Any) -> bool:
        """Call `update_parameters`, the verb of torch's `AveragedModel`, as `step` does. Sync: as `step`."""
        return self._pass_on(self.scheduler.update_parameters, args, kwargs)

    def _pass_on(self, verb: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        results = [last_step() for last_step in self._last_steps]
        applied = all(result is not None and result.applied for result in results)
        if applied:
            verb(*args, **kwargs)
        return applied
