"""TensorFlow's own debuggers, which see every number of a backward, and so the loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Final

import tensorflow as tf

from ampx.callers import script_line
from ampx.run import Manager, patched


class Debuggers:
    """Which of them the script has switched on, and where."""

    def __init__(self, manager: Manager[Any]) -> None:
        self._manager: Final = manager
        self._checks = ""  # the line that switched checks on
        self._dumps = ""

    def check(self) -> None:
        """Refuse a script whose losses are scaled and which ends at the first number that is not finite."""
        manager = self._manager
        if self._checks and manager.scales and not manager.stood_down:
            manager.run.refuse(
                "tf.debugging.enable_check_numerics ends the script where a loss scale overflows, which is meant to be "
                "a skipped step; accepted: scripts without it. Remove that call, or run with --dtype bfloat16, which "
                "has no loss scale",
                self._checks,
            )

    def report(self) -> None:
        """Say in the headline of the report who read numbers that carry the loss scale."""
        manager = self._manager
        if self._dumps and manager.scales and not manager.stood_down:
            dump = "tf.debugging.experimental.enable_dump_debug_info"
            manager.run.recorder.note_scaled(f"{dump} ({PurePath(self._dumps).name})")

    def checking(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return `tf.debugging.enable_check_numerics`."""

        @functools.wraps(native)
        def enable(*args: Any, **kwargs: Any) -> Any:
            self._checks = script_line()
            self.check()
            return native(*args, **kwargs)

        return enable

    def ending(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return `tf.debugging.disable_check_numerics`."""

        @functools.wraps(native)
        def disable(*args: Any, **kwargs: Any) -> Any:
            self._checks = ""
            return native(*args, **kwargs)

        return disable

    def dumping(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return `tf.debugging.experimental.enable_dump_debug_info`."""

        @functools.wraps(native)
        def enable(*args: Any, **kwargs: Any) -> Any:
            self._dumps = script_line()
            return native(*args, **kwargs)

        return enable


@contextmanager
def debuggers_noted(debuggers: Debuggers) -> Iterator[None]:
    """Patch how TensorFlow's debuggers are switched on."""
    with patched(
        (tf.debugging, "enable_check_numerics", debuggers.checking),
        (tf.debugging, "disable_check_numerics", debuggers.ending),
        (tf.debugging.experimental, "enable_dump_debug_info", debuggers.dumping),
    ):
        yield
