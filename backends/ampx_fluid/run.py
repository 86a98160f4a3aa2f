"""`import paddle.fluid` in a script that `ampx run` runs: ampx's own, from the moment the script asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ampx.run import ImportAlias, Manager

_FLUID: Final = "paddle.fluid"


@contextmanager
def old_names(manager: Manager[Any]) -> Iterator[None]:
    """Let the script import `paddle.fluid`."""
    with ImportAlias([_FLUID], _install, _uninstall).installed():
        yield


def _install(name: str) -> None:
    from ampx_fluid import fluid  # switches nothing on, but imports much

    fluid.install()


def _uninstall() -> None:
    from ampx_fluid import fluid

    fluid.uninstall()
