"""The first module whose output is not finite: `trace_overflow`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ampx.backend import offer
from ampx.session import sessions

from .probe import Probe, Reading, Watch, Watching


class OverflowTrace:
    """What `trace_overflow` saw up to now."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @property
    def first(self) -> Reading | None:
        """The first output of a module that is not finite, in order of execution; None while there is none."""
        readings = self._watch.readings()
        return next((entry for entry in readings if entry.direction == "forward" and entry.value.nonfinite), None)

    def __str__(self) -> str:
        first = self.first
        if first is None:
            return "no module's output overflowed"
        origin = "its inputs were not finite either" if first.inputs.nonfinite else "its inputs were finite"
        return (
            f"{first.module or '(the model)'} ({first.kind}): {first.value.nonfinite} of {first.value.elements} "
            f"outputs in {first.dtype} are not finite; {origin}, the largest finite one being {first.inputs.largest:g}"
        )


def trace_overflow(model: Any) -> AbstractContextManager[OverflowTrace]:
    """Return a region whose target has the first module with a non-finite output as `first`, and says it as text.

    Raises:
        UnsupportedByBackendError: The backend cannot watch modules.

    Sync: where `first` is read.
    """
    probe = offer(sessions.find("trace_overflow", model).backend, Probe)
    return _traced(probe.watch(model, Watching()))


@contextmanager
def _traced(region: AbstractContextManager[Watch]) -> Iterator[OverflowTrace]:
    with region as watch:
        yield OverflowTrace(watch)
