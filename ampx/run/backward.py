"""A backward of the script: when it is scaled, and what the recorder learns of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from .manager import Manager

SomeManager = TypeVar("SomeManager", bound=Manager[Any])


class ScriptBackward(Generic[SomeManager]):
    """What stands in the place of a framework's backward; a backend says how that takes losses."""

    def __init__(self, manager: SomeManager) -> None:
        """Scale for the optimizers of this manager."""
        self.manager = manager

    def run(self, losses: Any, native: Callable[[Any], None]) -> None:
        """Run a backward, scaled for the script's optimizers where it has any; `native` takes the losses."""
        manager = self.manager
        listed = list(losses) if isinstance(losses, (list, tuple)) else [losses]
        if self.is_inside():
            self.run_inside(losses, native)
        elif manager.stood_down:
            with manager.records_only("backward"):
                native(losses)
        elif not (optimizers := self.optimizers()) or not all(map(self.is_loss, listed)):
            native(losses)
        else:
            recorder = manager.run.recorder
            if recorder.wants_losses:
                recorder.saw_loss(self.reader_of(listed))
            with recorder.phase("backward"):
                self.run_scaled(optimizers, losses, native)

    def is_inside(self) -> bool:
        """Return whether another backward calls the code that runs."""
        return self.manager.inside

    def optimizers(self) -> list[Any]:
        """Return the script's optimizers, each with its wrapper."""
        return self.manager.all()

    def is_loss(self, value: Any) -> bool:
        """Return whether a backward of this may be scaled; else the framework shall refuse it in its own words."""
        return True

    def reader_of(self, losses: Sequence[Any]) -> Callable[[], float]:
        """Return a function that reads these losses as a report shows them, when it may be waited for."""
        raise NotImplementedError

    def run_scaled(self, optimizers: list[Any], losses: Any, native: Callable[[Any], None]) -> None:
        """Run a backward of losses that are multiplied for these optimizers."""
        raise NotImplementedError

    def run_inside(self, losses: Any, native: Callable[[Any], None]) -> None:
        """Run a backward that another one calls: what it adds is to carry the same loss scale."""
        native(losses)
