"""Gradients that a script clips while they carry the loss scale, which makes every step too small: said once.

The bound of torch's functions is not known here. But a write to scaled gradients that is right, a mean over processes
say, keeps their proportions, and a bound gives one norm in every step, whatever the norm was before. Of scripts that
write nothing between `scale_loss` and the step, versions of tensors are compared in the first steps, and no more. In
the body of `scale_loss` the norm before is not known: gradients that were written to more than once there, which
accumulation does, too, must end at one norm in all of the first steps. To read it there waits for the device, so that
steps which never do, as fused ones on an accelerator, are not looked at in this way.
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

_STEPS: Final = 10  # in which a first write is waited for, and bodies are looked at
_LIMIT: Final = 100  # steps, where somebody writes
_PROOFS: Final = 3  # so many that end at one norm, each from another, are no accident
# Clipping rounds the elements and the norm, and both norms are rounded here.
_ROUNDING: Final = {True: 16 * 2.0**-11, False: 1e-4}


class ScaledClipping:
    """Looks at the first steps of one optimizer, until it is `ended`."""

    def __init__(self) -> None:
        self.ended = False
        self._steps = 0
        self._versions: list[int] = []  # when the last body ended
        self._writes: list[tuple[list[float], list[float]]] | None = None  # norms before and after; None: no write yet
        self._end: torch.Tensor | None = None  # norms when the last body ended
        self._ends: list[torch.Tensor] = []  # norms when bodies ended that may have written to what backward left

    def end_body(self, gradients: Sequence[torch.Tensor]) -> None:
        """Note gradients as a body of `scale_loss` leaves them."""
        self._versions = [gradient._version for gradient in gradients]
        # A first backward leaves new tensors that nobody has written to.
        wanted = self._writes is not None or any(self._versions)
        self._end = _norms(gradients) if wanted and _comparable(gradients) else None

    def begin_step(self, gradients: Sequence[torch.Tensor], waits: bool) -> None:
        """Compare them with those of the step, which is about to unscale them, and waits for its device or never does.

        Sync: one where somebody wrote after a body; once one where gradients were written to more than once in bodies.
        """
        self._steps += 1
        self.ended = self._steps >= (_STEPS if self._writes is None else _LIMIT)
        if self._end is not None and self._steps <= _STEPS and any(self._versions):
            self._ends.append(self._end)
        rounding = _ROUNDING[bool(gradients) and gradients[0].dtype in LOW]
        if self._versions == [gradient._version for gradient in gradients]:
            if self._steps == _STEPS and waits and _comparable(gradients) and _all_end_alike(self._ends, rounding):
                self._warn("inside scale_loss")
            return
        if self._writes is None:
            self._writes = []
        if self._end is None or not _comparable(gradients):
            return
        self._writes = [*self._writes[1 - _PROOFS :], (self._end.tolist(), _norms(gradients).tolist())]
        if len(self._writes) == _PROOFS and _is_bounded(self._writes, rounding):
            self._warn("between scale_loss and the step")

    def _warn(self, where: str) -> None:
        self.ended = True
        callers.warn(
            f"gradients were clipped {where}, while they carried the loss scale: in several steps their norm was the "
            f"same after it, and another before. Every update is too small by the loss scale. Clip true gradients: "
            f"ampx.clip_grad_norm(opt, max_norm), max_grad_norm=… of wrap_optimizer, or ampx.unscale(opt) before the "
            f"clipping.",
            PrecisionWarning,
        )


def _all_end_alike(ends: list[torch.Tensor], rounding: float) -> bool:
    """Return whether finite gradients ended at one L2 norm, however they differed: who clips them clips all."""
    finite = [end for end in (end.tolist() for end in ends) if 0.0 < end[0] < inf]
    if len(finite) < _STEPS // 2:
        return False
    (least, most), (smallest, largest) = ((min(norms), max(norms)) for norms in zip(*finite, strict=True))
    return bool(most <= least * (1 + rounding) and largest > smallest * (1 + 10 * rounding))


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
    """Return the L2 norm and the largest absolute value of all, in float32."""
    device, norms = gradients[0].device, []
    for order in (2.0, inf):
        each = [torch.linalg.vector_norm(own, order, dtype=torch.float32).to(device) for own in gradients]
        norms.append(torch.linalg.vector_norm(torch.stack(each), order))
    return torch.stack(norms)
