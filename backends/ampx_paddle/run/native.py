"""Mixed precision of the script's own, which is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import paddle

from ampx.run import asked_by_script

from .manager import PaddleManager

OWN: Final = ("paddle", "ampx", "ampx_paddle", "contextlib")
THROUGH: Final = ("ampx_paddle.run",)


@contextmanager
def native_refused(manager: PaddleManager) -> Iterator[None]:
    """Patch `auto_cast`, `decorate` and `GradScaler`. What is called with `enable=False` stays as it is."""
    with ExitStack() as stack:
        for place, name in (
            (paddle.amp, "auto_cast"),
            (paddle.amp, "decorate"),
            (paddle.static.amp, "decorate"),
            (paddle.amp.GradScaler, "__init__"),
        ):
            stack.enter_context(mock.patch.object(place, name, _refusing(manager, place, name)))
        yield


def _refusing(manager: PaddleManager, place: Any, name: str) -> Any:
    native = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        switch = args[1:2] if name == "__init__" else args[:1] if name == "auto_cast" else ()
        enabled = kwargs.get("enable", switch[0] if switch else True)
        if enabled and not manager.stood_down and asked_by_script(OWN, THROUGH):
            shown = "paddle.amp.GradScaler" if name == "__init__" else f"{place.__name__}.{name}"
            manager.run.refuse(
                f"the script uses {shown} by itself; accepted: a script without mixed precision of its own. Turn it "
                f"off in the script, or edit the script to use ampx"
            )
        return native(*args, **kwargs)

    return call
