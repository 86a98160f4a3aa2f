"""Several losses with loss scales of their own on one optimizer.

Gradients of losses with different scales must not be added while they are scaled. So as soon as a second loss id
appears before a step, the gradients so far are made true and put aside, the new ones are made true right after
their backward, and the two are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ampx.errors import ProtocolError

if TYPE_CHECKING:
    from .optimizer import AmpOptimizer


class LossMixer:
    """Keeps apart what carries different scales, for one optimizer."""

    def __init__(self, owner: AmpOptimizer) -> None:
        """Serve one wrapped optimizer; a weak link would not outlive it anyway."""
        self._owner = owner
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._loss_id: int | None = None
        self.reevaluating = False

    def current_loss_id(self) -> int:
        """Give the loss id whose gradients are scaled at the moment."""
        return next(iter(self._owner.ampx_member.factors)) if self._loss_id is None else self._loss_id

    def before(self, loss_id: int) -> None:
        """Put true gradients aside where the coming ones would not go with them."""
        owner, member = self._owner, self._owner.ampx_member
        if self.reevaluating:
            self._expect_no_gradients()
            return
        if not member.mixes:
            if not member.factors or loss_id in member.factors:
                return
            member.mixes = True
            self._loss_id = next(iter(member.factors))
        owner.check_and_unscale()
        self._loss_id = loss_id
        for parameter in owner.gradients.parameters():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def after(self, loss_id: int) -> None:
        """Make the new gradients true and add those put aside."""
        if self._owner.ampx_member.mixes and not self.reevaluating:
            self._owner.check_and_unscale()
            self._bring_back()

    def abandon(self) -> None:
        """Drop what an unfinished backward left, and bring back what was put aside."""
        if self._owner.ampx_member.mixes and not self.reevaluating:
            for parameter in self._owner.gradients.parameters():
                parameter.grad = None
            self._bring_back()

    def reset(self) -> None:
        """Start afresh after a step."""
        self._loss_id = None
        self._aside = []
        self._owner.ampx_member.mixes = self.reevaluating

    def _bring_back(self) -> None:
        aside, self._aside = self._aside, []
        for parameter, gradient in aside:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                # In place, so that gradients which are views of a communication buffer stay so.
                parameter.grad.add_(gradient)

    def _expect_no_gradients(self) -> None:
        """Within an optimizer that evaluates its closure again, old gradients are true and new ones scaled."""
        if self._owner.ampx_member.stage != "unscaled":
            return
        if any(p.grad is not None and bool(p.grad.any()) for p in self._owner.gradients.parameters()):
            raise ProtocolError(
                "the closure called scale_loss without clearing the gradients of its former evaluation; true and "
                "scaled gradients would be added. Call opt.zero_grad() first in the closure."
            )
