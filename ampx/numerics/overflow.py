"""`trace_overflow` on the verb `watch`: the first module whose output is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ampx.backend import Backend, Reading, Watch, Watching


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


@contextmanager
def trace_overflow(backend: Backend, model: Any) -> Iterator[OverflowTrace]:
    """Watch the modules of a model; what a backend's verb of this name returns where `watch` is there."""
    with backend.watch(model, Watching()) as watch:
        yield OverflowTrace(watch)
