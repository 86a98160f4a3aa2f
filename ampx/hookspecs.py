"""The hooks a plugin may implement, and the marker to implement them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pluggy

from .backend import Backend
from .events import Event

PROJECT = "ampx"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Register(Protocol):
    """The callable that `ampx_register_backends` receives."""

    def __call__(
        self,
        name: str,
        load: Callable[[], Backend],
        *,
        roots: Sequence[str],
        requires: str,
        stands_in_for: Sequence[str] = (),
    ) -> None:
        """Register one framework.

        Args:
            name: What `ampx.init(framework=…)` takes.
            load: Gives the backend; the only place where the plugin imports the framework.
            roots: Root modules of the framework's objects, such as `("torch",)`.
            requires: The requirement to install, such as `"torch>=2.4"`.
            stands_in_for: Modules that the backend's `automate` provides to a script where they are missing, such as
                `("apex",)`: `ampx run` imports the framework first when the script asks for one.
        """


@hookspec
def ampx_register_backends(register: Register) -> None:
    """Register backends: call `register(name, load, roots=…, requires=…)` for each."""


@hookspec
def ampx_event(event: Event) -> Any:
    """Receive every event of every framework, in order. An exception reaches the user's `step`."""
