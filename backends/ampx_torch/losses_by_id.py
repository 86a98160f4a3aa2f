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
    from .step import Stepping


class LossMixer:
    """Keeps apart what carries different scales, for one optimizer.

    The optimizer is handed to every call: a link to it would make a cycle, and parameters would wait for the
    garbage collector.

    Attributes:
        evaluating: The optimizer evaluates its closure as often as it likes.
        loss_id: The loss whose gradients were scaled last, once there are several; else None.
    """

    def __init__(self) -> None:
        """Start with one loss."""
        self.evaluating = False
        self.loss_id: int | None = None
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._new_evaluation = False

    def begin_evaluation(self) -> None:
        """Note that the closure is about to run: its gradients have nothing to do with earlier ones."""
        self._new_evaluation = True

    def before(self, owner: Stepping, loss_id: int) -> None:
        """Put true gradients aside where the coming ones would not go with them."""
        member = owner.ampx_member
        if self._new_evaluation:
            self._new_evaluation = False
            _expect_no_gradients(owner)
            self._forget_losses()
            owner.restart()
        if self.loss_id is None:
            if not member.factors or loss_id in member.factors:
                return
            if not owner.collect():  # they were cleared behind the wrapper's back, by model.zero_grad()
                member.drop_factors()
                return
            owner.check_and_unscale()
        member.begin_change()  # until the body is entered
        member.mixes = True
        self.loss_id = loss_id
        for parameter in owner.gradients.parameters():
            if parameter.grad is not None:
                # A copy: the gradient may be part of a communication buffer that the next backward overwrites.
                self._aside.append((parameter, parameter.grad.clone()))
        _drop_gradients(owner)

    def after(self, owner: Stepping) -> None:
        """Make the new gradients true and add those put aside; only where there are several losses."""
        owner.divide_new()
        owner.ampx_member.note_unscaled()

    def abandon(self, owner: Stepping) -> None:
        """Drop what an unfinished backward left, and bring back what was put aside."""
        if self.loss_id is not None:
            _drop_gradients(owner)
            self.bring_back()

    def reset(self, owner: Stepping) -> None:
        """Start afresh after a step."""
        self._forget_losses()
        owner.ampx_member.mixes = self.evaluating

    def _forget_losses(self) -> None:
        self.loss_id = None
        self._aside = []

    @property
    def waits(self) -> bool:
        """Whether gradients were put aside."""
        return bool(self._aside)

    def bring_back(self) -> None:
        """Add the gradients put aside to those that are there."""
        aside, self._aside = self._aside, []
        with torch.no_grad():
            for parameter, gradient in aside:
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    # In place, so that gradients which are views of a communication buffer stay so.
                    parameter.grad.add_(gradient)


def _drop_gradients(owner: Stepping) -> None:
    for parameter in owner.gradients.parameters():
        parameter.grad = None
    if owner.masters is not None:
        for parameter in owner.masters.model_parameters():
            parameter.grad = None


def _expect_no_gradients(owner: Stepping) -> None:
    """Raise where gradients of an earlier evaluation are left: they are true, and the new ones scaled."""
    if any(bool(gradient.any()) for bucket in owner.gradients.collect() for gradient in bucket):
        raise ProtocolError(
            "the closure called scale_loss without clearing the gradients of its former evaluation; true and "
            "scaled gradients would be added. Call opt.zero_grad() first in the closure."
        )
