"""Gradients that hang on the parameters before the first backward of a step, and the loss scale that they carry.

A step leaves true gradients. What a skipped step, a body of `scale_loss` that raised, or the scaled loss of other
optimizers leaves is noted with the tensor and how often it was written: if neither changed, nobody cleared it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from ampx.errors import ProtocolError
from ampx.optimizer import NotCopied

from .gradients import any_nonzero, unscale_

# Gradients that have to be divided by the same number.
Plan: TypeAlias = list[tuple[Any, list[torch.Tensor]]]
# A parameter, its gradient, and how often that was written.
Sight: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, int]
# A gradient, how often it was written (None: no matter), and the scale that it carries (None: nobody can tell).
Note: TypeAlias = tuple[weakref.ref[torch.Tensor], int | None, Any]


class Leftovers(NotCopied):
    """What is noted of one optimizer's gradients: `notes`, by the parameter's id, is empty nearly always."""

    def __init__(self) -> None:
        self.notes: dict[int, Note] = {}

    def note(self, parameters: Iterable[torch.Tensor], factor: Any) -> None:
        """Note that the gradients of parameters carry this scale; None: nobody can tell which."""
        if isinstance(factor, torch.Tensor):
            factor = factor.clone()  # on a device the scale moves in place
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                self.notes[id(parameter)] = (weakref.ref(gradient), gradient._version, factor)

    def note_true(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that gradients are true, and stay so whoever writes to them: another optimizer unscaled them."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.notes[id(parameter)] = (weakref.ref(parameter.grad), None, 1.0)

    def factor_of(self, parameter: torch.Tensor, gradient: torch.Tensor, version: int, default: Any) -> Any:
        """Return the scale that was noted of this very gradient, or else the default."""
        note = self.notes.get(id(parameter))
        same = note is not None and note[1] in (None, version) and note[0]() is gradient
        return note[2] if note is not None and same else default

    def are_unknown(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether gradients are left whose scale nobody can tell. Sync: one a gradient, where there are."""
        return any(
            any_nonzero(gradient)
            for parameter, gradient in ((parameter, parameter.grad) for parameter in parameters)
            if gradient is not None and self.factor_of(parameter, gradient, gradient._version, 1.0) is None
        )

    def note_foreign(self, before: Iterable[Sight], default: Any, scale: Any) -> None:
        """Note the gradients that a backward has written to whose loss had this scale, for other optimizers.

        By `default` they carried another scale before, unless otherwise noted; None where they must not be added to.
        """
        for parameter, gradient, version in before:
            carried = scale
            if gradient is not None:
                if parameter.grad is gradient and gradient._version == version:
                    continue
                carried = self.factor_of(parameter, gradient, version, default)
            self.note((parameter,), scale if default is not None and _same(carried, scale) else None)

    def plan(
        self, parameters: Iterable[torch.Tensor], scale: Any, default: Any
    ) -> list[tuple[Any, list[torch.Tensor]]]:
        """List gradients that do not carry a scale yet, with what they must be divided by to do so.

        Gradients of which nothing is noted carry `default`. Raise where nobody can tell, unless they are zeros.

        Sync: none; one for each gradient of which nobody can tell.
        """
        kinds: Plan = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            factor = self.factor_of(parameter, gradient, gradient._version, default) if self.notes else default
            if factor is None:
                if any_nonzero(gradient):
                    raise ProtocolError(
                        "gradients hang on the parameters that a skipped step left, that were there before "
                        "add_param_group, or that carry more than one loss scale because a loss was scaled for other "
                        "optimizers; accepted: cleared gradients, or scale_loss with all the optimizers whose "
                        "gradients a backward makes. Call opt.zero_grad()."
                    )
            elif not _same(factor, scale):
                for other, gradients in kinds:
                    if _same(factor, other):
                        gradients.append(gradient)
                        break
                else:
                    kinds.append((factor, [gradient]))
        return [(factor / scale, gradients) for factor, gradients in kinds]


def divide(plan: Plan) -> None:
    """Carry out a plan, in place."""
    for divisor, gradients in plan:
        unscale_(gradients, divisor)


def look(parameters: Iterable[torch.Tensor]) -> list[Sight]:
    """Look at the gradients of parameters."""
    pairs = [(parameter, parameter.grad) for parameter in parameters]
    return [(parameter, gradient, 0 if gradient is None else gradient._version) for parameter, gradient in pairs]


def _same(factor: Any, other: Any) -> bool:
    """Return whether two scales are known to be equal without looking at a device."""
    if isinstance(factor, torch.Tensor) or isinstance(other, torch.Tensor):
        return factor is other
    return bool(factor == other)
