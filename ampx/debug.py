"""Which parameters have gradients that are inf or NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """Return the parameters whose gradients are inf or NaN now: after a skipped step, and before `zero_grad`.

    Args:
        opt: The wrapped optimizer.
        model: The model that the names come from; without it they are positions in the optimizer, unless the optimizer
            was made from named parameters.

    Returns:
        The parameters in the optimizer's order; empty when all gradients are finite.

    Raises:
        NotWrappedError: `opt` does not come from `wrap_optimizer`.
        UnsupportedByBackendError: The backend cannot tell.

    Sync: one.

    Example:
        >>> ampx.debug.nonfinite_parameters(optimizer, model)
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
