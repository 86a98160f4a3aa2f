"""Find out where a non-finite value comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from .backend import Reading, Watch, Watching
from .errors import NotWrappedError
from .optimizer import WrappedOptimizer
from .session import sessions


@dataclass(frozen=True)
class NonFiniteParameter:
    """A parameter whose gradient is not finite.

    Attributes:
        name: The parameter's name.
        nonfinite: How many elements of its gradient are inf or NaN.
        elements: How many elements it has.
    """

    name: str
    nonfinite: int
    elements: int


def nonfinite_parameters(opt: Any, model: Any = None) -> list[NonFiniteParameter]:
    """Name the parameters whose present gradients are not finite; call it after a skipped step.

    The gradients are looked at as they are now, so call it before `zero_grad`.

    Args:
        opt: The wrapped optimizer.
        model: Where the names come from; without it they are positions in the optimizer, unless the optimizer
            was made from named parameters.

    Returns:
        The parameters in the optimizer's order; empty when all gradients are finite.

    Raises:
        NotWrappedError: `opt` does not come from `wrap_optimizer`.
        UnsupportedByBackendError: The backend cannot tell.

    Sync: one.
    """
    session = sessions.search([opt])
    state = None if session is None else session.backend.state_handle(opt, "nonfinite_parameters")
    if state is None and not isinstance(opt, WrappedOptimizer):
        raise NotWrappedError(
            f"nonfinite_parameters got {type(opt).__name__}, which wrap_optimizer did not return; accepted: a wrapped "
            f"optimizer. Pass the result of ampx.wrap_optimizer(opt)."
        )
    backend = sessions.find("nonfinite_parameters", opt).backend
    return [NonFiniteParameter(*row) for row in backend.nonfinite_parameters(opt, model)]


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
    return _traced(sessions.find("trace_overflow", model).backend.watch(model, Watching()))


@contextmanager
def _traced(region: AbstractContextManager[Watch]) -> Iterator[OverflowTrace]:
    with region as watch:
        yield OverflowTrace(watch)
