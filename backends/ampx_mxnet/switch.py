"""Whether casting is on: for all threads by default, for one thread inside a region."""

from __future__ import annotations

import threading
from typing import Final

from ampx.backend import CastPlan

_UNSET: Final = object()


class _Thread(threading.local):
    """What the calling thread's innermost region says; `_UNSET` outside of regions."""

    plan: object = _UNSET


class _Process:
    """What holds outside of regions."""

    plan: CastPlan | None = None


_thread = _Thread()


def current() -> object:
    """Return the plan by which the calling thread casts, or None."""
    plan = _thread.plan
    return _Process.plan if plan is _UNSET else plan


def set_default(plan: CastPlan | None) -> None:
    """Set what holds outside of regions, in all threads."""
    _Process.plan = plan


class Within:
    """A region of one thread. A class, because it is entered in every step and a generator costs more."""

    __slots__ = ("_before", "_plan")

    def __init__(self, plan: CastPlan | None) -> None:
        """Remember the plan."""
        self._plan = plan
        self._before: object = _UNSET

    def __enter__(self) -> None:
        """Cast by the plan from here on."""
        self._before = _thread.plan
        _thread.plan = self._plan

    def __exit__(self, *error: object) -> None:
        """Cast as before."""
        _thread.plan = self._before


def within(plan: CastPlan | None) -> Within:
    """Return a region of the calling thread."""
    return Within(plan)
