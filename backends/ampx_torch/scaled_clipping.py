"""Gradients that a script clips while they carry the loss scale, which makes every step too small: said once.

The bound of torch's functions is not known here. But a write to scaled gradients that is right, a mean over processes
say, keeps their proportions, and a bound gives one norm in every step, whatever the norm was before. Of scripts that
write nothing between `scale_loss` and the step, versions of tensors are compared in the first steps, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Final

import torch

from ampx import callers
from ampx.errors import PrecisionWarning

from .trees import LOW

_STEPS: Final = 10  # in which a first write is waited for
_LIMIT: Final = 100  # steps, where somebody writes
_PROOFS: Final = 3  # so many that end at one norm, each from another, are no accident
# Clipping rounds the elements and the norm, and both norms are rounded here.
_ROUNDING: Final = {True: 4 * 2.0**-11, False: 1e-4}


class ScaledClipping:
    """Looks at the first steps of one optimizer, until it is `ended`."""

    def __init__(self) -> None:
        self.ended = False
        self._steps = 0
        self._versions: list[int] = []  # when the last body ended
        self._writes: list[tuple[list[float], list[float]]] | None = None  # norms before and after; None: no write yet
        self._before: torch.Tensor | None = None

    def end_body(self, gradients: Sequence[torch.Tensor]) -> None:
        """Note gradients as a body of `scale_loss` leaves them."""
        self._versions = [gradient._version for gradient in gradients]
        self._before = None if self._writes is None or not _comparable(gradients) else _norms(gradients)

    def begin_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Compare them with those of the step, which is about to unscale them. Sync: one where somebody wrote."""
        self._steps += 1
        self.ended = self._steps >= (_STEPS if self._writes is None else _LIMIT)
        if self._versions == [gradient._version for gradient in gradients]:
            return
        if self._writes is None:
            self._writes = []
        if self._before is None or not _comparable(gradients):
            return
        self._writes = [*self._writes[1 - _PROOFS :], (self._before.tolist(), _norms(gradients).tolist())]
        if len(self._writes) == _PROOFS and _is_bounded(self._writes, _ROUNDING[gradients[0].dtype in LOW]):
            self.ended = True
            callers.warn(
                "gradients were clipped between scale_loss and the step, while they carried the loss scale: in several "
                "steps their norm was the same after it, and another before. Every update is too small by the loss "
                "scale. Clip true gradients: ampx.clip_grad_norm(opt, max_norm), max_grad_norm=… of wrap_optimizer, "
                "or ampx.unscale(opt) before the clipping.",
                PrecisionWarning,
            )


def _is_bounded(writes: list[tuple[list[float], list[float]]], rounding: float) -> bool:
    """Return whether writes ended at one norm, each from another or from an infinite one."""
    for kind in range(2):
        befores, afters = (sorted(write[when][kind] for write in writes) for when in range(2))
        same = afters[0] > 0.0 and afters[-1] < inf and afters[-1] <= afters[0] * (1 + rounding)
        if same and all(more > less * (1 + 10 * rounding) or more == inf for less, more in pairwise(befores)):
            return True
    return False


def _comparable(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether there are gradients, whole and dense, that may be looked at now."""
    if not gradients or (gradients[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return all(type(gradient) is torch.Tensor and gradient.layout is torch.strided for gradient in gradients)


def _norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm and the largest absolute value of all, in float64."""
    device, norms = gradients[0].device, []
    for order in (2.0, inf):
        each = [torch.linalg.vector_norm(own, order, dtype=torch.float64).to(device) for own in gradients]
        norms.append(torch.linalg.vector_norm(torch.stack(each), order))
    return torch.stack(norms)
