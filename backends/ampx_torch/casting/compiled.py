"""Backward of compiled functions: not cast, as in eager mode.

Native defect: torch.compile traces the backward of a function when it compiles the forward, and under the same
autocast. So a float32 region loses its range in backward: finite gradients overflow, and steps are skipped. An option
of the compiler tells it otherwise (torch 2.9 and later; before, compiled backwards are cast).
"""

from __future__ import annotations

import importlib
import threading
from functools import cache
from typing import Any, Final

_OPTION: Final = "backward_pass_autocast"
_AS_FORWARD: Final = ("same_as_forward", "default")


class _Thread(threading.local):
    """The users of the option, and its first value: torch keeps it by thread, and reading it is slow."""

    def __init__(self) -> None:
        self.users: set[int] = set()  # by identity: who was interrupted may give it back without having taken it
        self.asked = False
        self.before: Any = None  # None: it is not there, or somebody chose it


_thread = _Thread()


def keep_backward_uncast(user: object) -> None:
    """Have functions that are compiled from now on run backward without casts, until each user has released it.

    What somebody chose before stays.
    """
    _thread.users.add(id(user))
    if len(_thread.users) > 1:
        return
    if not _thread.asked:
        before = getattr(_options(), _OPTION, None)
        _thread.asked, _thread.before = True, before if before in _AS_FORWARD else None
    if _thread.before is not None:
        setattr(_options(), _OPTION, "off")


def release(user: object) -> None:
    """Undo the user's `keep_backward_uncast`."""
    _thread.users.discard(id(user))
    if not _thread.users and _thread.before is not None:
        setattr(_options(), _OPTION, _thread.before)


@cache
def _options() -> Any:
    return importlib.import_module("torch._functorch.config")  # not before it is needed: it takes milliseconds
