"""Whether casting is on: for all threads by default, for one thread inside a region."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ampx.contract import CastPlan

_UNSET: Final = object()


class _Thread(threading.local):
    """What the calling thread's innermost region says; `_UNSET` outside of regions."""

    plan: object = _UNSET


class _Process:
    """What holds outside of regions."""

    plan: CastPlan | None = None


_thread = _Thread()


def current() -> object:
    """Give the plan by which the calling thread casts, or None. Sync: none."""
    plan = _thread.plan
    return _Process.plan if plan is _UNSET else plan


def set_default(plan: CastPlan | None) -> None:
    """Set what holds outside of regions, in all threads. Sync: none."""
    _Process.plan = plan


@contextmanager
def within(plan: CastPlan | None) -> Iterator[None]:
    """Give a region of the calling thread. Sync: none."""
    before = _thread.plan
    _thread.plan = plan
    try:
        yield
    finally:
        _thread.plan = before
