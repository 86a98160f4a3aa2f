"""Whether casting is on: for all threads by default, for one thread inside a region."""

from __future__ import annotations

import threading
import weakref

from ampx.backend import CastPlan


class _Thread(threading.local):
    """The regions that the calling thread has entered, the innermost first.

    Only the `with` statement keeps a region alive: one that an exception kept from being left to the end does not count
    any more.
    """

    regions: tuple[weakref.ref[Region], ...] = ()


class _Process:
    """What holds outside of regions."""

    plan: CastPlan | None = None


_thread = _Thread()


def current() -> CastPlan | None:
    """Return the plan by which the calling thread casts, or None."""
    for reference in _thread.regions:
        region = reference()
        if region is not None:
            return region.plan
    return _Process.plan


def set_default(plan: CastPlan | None) -> None:
    """Set what holds outside of regions, in all threads; the calling thread is outside of them then."""
    _thread.regions = ()
    _Process.plan = plan


class Region:
    """A region of one thread. A class, because it is entered in every step and a generator costs more."""

    __slots__ = ("__weakref__", "plan")

    def __init__(self, plan: CastPlan | None) -> None:
        self.plan = plan  # by which the thread casts inside; None: not at all

    def __enter__(self) -> None:
        others = self._others() if _thread.regions else ()
        _thread.regions = (weakref.ref(self), *others)

    def __exit__(self, *error: object) -> None:
        _thread.regions = self._others()

    def _others(self) -> tuple[weakref.ref[Region], ...]:
        return tuple([entry for entry in _thread.regions if entry() not in (self, None)])
