"""The first module whose output is not finite: `trace_overflow`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ampx.backend import offer
from ampx.session import sessions

from .probe import Probe, Reading, Watch, Watching


class OverflowTrace:
    """What `trace_overflow` saw up to now; as text, one sentence."""

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
    """Return a region that finds the first module whose output is inf or NaN.

    Args:
        model: The model; its parameters where these are a value (JAX).

    Returns:
        A context manager that yields an `OverflowTrace`.

    Raises:
        UnsupportedByBackendError: The backend cannot watch modules.

    Sync: where `first` is read.

    Example:
        >>> with ampx.trace_overflow(model) as trace:
        ...     loss = loss_fn(model(x), y)
        >>> print(trace)
    """
    probe = offer(sessions.find("trace_overflow", model).backend, Probe)
    return _traced(probe.watch(model, Watching()))


@contextmanager
def _traced(region: AbstractContextManager[Watch]) -> Iterator[OverflowTrace]:
    with region as watch:
        yield OverflowTrace(watch)
