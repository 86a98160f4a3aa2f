"""Several losses with loss scales of their own on one optimizer.

Gradients of losses with different scales must not be added while they are scaled. So as soon as a second loss id
appears before a step, the gradients so far are unscaled and put aside, the new ones are unscaled right after
their backward, and the two are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ampx.errors import ProtocolError
from ampx.protocol import NotCopied

from .trees import gradient_of

if TYPE_CHECKING:
    from .step import AmpOptimizer

Aside: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


class LossMixer(NotCopied):
    """Keeps apart what carries different scales, for one optimizer.

    The optimizer is handed to every call: a link to it would make a cycle, and parameters would wait for the
    garbage collector.
    """

    def __init__(self) -> None:
        self.evaluating = False  # the optimizer evaluates its closure as often as it likes
        self.loss_id: int | None = None  # the loss whose gradients were scaled last, once there are several; else None
        self.aside: Aside = []  # the gradients that were put aside, with their parameters
        self._new_evaluation = False

    def begin_evaluation(self) -> None:
        """Note that the closure is about to run: its gradients have nothing to do with earlier ones."""
        self._new_evaluation = True

    def check(self, owner: AmpOptimizer) -> None:
        """Raise where an evaluation begins and gradients of the former one are left."""
        if self._new_evaluation:
            _expect_no_gradients(owner)

    def before(self, owner: AmpOptimizer, loss_id: int) -> None:
        """Put unscaled gradients aside where the coming ones cannot be added to them."""
        member = owner.ampx_member
        if self._new_evaluation:
            self._new_evaluation = False
            _expect_no_gradients(owner)
            self._forget_losses()
            owner.findings.checked = {}
            member.restart()
        if self.loss_id is None:
            if not member.factors or loss_id in member.factors:
                return
            if not owner.collect():  # they were cleared by model.zero_grad()
                member.drop_factors()
                return
            owner.check_and_unscale()
        member.begin_change()  # until the body is entered
        member.mixes = True
        self.loss_id = loss_id
        put_aside(owner, self.aside)

    def after(self, owner: AmpOptimizer) -> None:
        """Unscale the new gradients and add those put aside; only where there are several losses.

        A backward that gave no gradient does not count for its loss.
        """
        gradients = owner.collect()
        if gradients or owner.process_group is not None:  # others of the group may have some
            owner.unscale(gradients)
        self.bring_back()
        owner.ampx_member.note_unscaled()

    def check_sum(self, owner: AmpOptimizer, flags: list[torch.Tensor]) -> Any:
        """Add what was put aside to new gradients with these flags, and test the sum; return the finiteness.

        A sum that overflows though its terms are finite counts for the loss that came last.
        """
        self.bring_back()
        gradients = owner.gradients
        sums = gradients.unscale(gradients.collect(), 1.0, fresh=True)  # tests them and changes none
        both = torch.stack([gradients.combine(flags), gradients.combine(sums)])
        if owner.process_group is not None:
            both = owner.agree(both)
        earlier = list(owner.findings.checked.values())
        if owner.on_device:
            fine = gradients.combine([*earlier, both[0]]) == 0
            return torch.maximum(both[0], torch.where(fine, both[1], 0.0))
        overflow, total = both.tolist()
        return not overflow and not (total and all(earlier))

    def abandon(self, owner: AmpOptimizer) -> None:
        """Drop what an unfinished backward left, and bring back what was put aside."""
        if self.loss_id is not None:
            drop_gradients(owner)
            self.bring_back()

    def reset(self, owner: AmpOptimizer) -> None:
        """Start afresh after a step."""
        self._forget_losses()
        owner.ampx_member.mixes = self.evaluating

    def _forget_losses(self) -> None:
        self.loss_id = None
        self.aside = []

    def bring_back(self) -> None:
        """Add the gradients put aside to those that are there."""
        aside, self.aside = self.aside, []
        add_back(aside)


def put_aside(owner: Any, aside: Aside) -> None:
    """Move the gradients of an optimizer to a list, with their parameters."""
    for parameter in owner.gradients.parameters():
        gradient = gradient_of(parameter)
        if gradient is not None:
            # A copy: the gradient may be part of a communication buffer that the next backward overwrites.
            aside.append((parameter, gradient.clone()))
    drop_gradients(owner)


def add_back(aside: Aside) -> None:
    """Add gradients that were put aside to those that are there."""
    with torch.no_grad():
        for parameter, gradient in aside:
            present = gradient_of(parameter)
            if present is None:
                parameter.grad = gradient
            else:
                # In place, so that gradients which are views of a communication buffer stay so.
                present.add_(gradient)


def drop_gradients(owner: Any) -> None:
    """Leave an optimizer without gradients, masters and model."""
    for parameter in owner.gradients.parameters():
        parameter.grad = None
    if owner.masters is not None:
        for parameter in owner.masters.model_parameters():
            parameter.grad = None


def _expect_no_gradients(owner: AmpOptimizer) -> None:
    """Raise where gradients of an earlier evaluation are left: they are unscaled, and the new ones are not."""
    if any(bool(gradient.any()) for bucket in owner.gradients.collect() for gradient in bucket):
        raise ProtocolError(
            "the closure called scale_loss without clearing the gradients of its former evaluation; true and "
            "scaled gradients would be added. Call opt.zero_grad() first in the closure."
        )
