"""Several losses with loss scales of their own on one optimizer.

Gradients of losses with different scales must not be added while they are scaled. So as soon as a second loss id
appears before a step, the gradients so far are unscaled and put aside, the new ones are unscaled right after
their backward, and the two are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from ampx.backend import Unscaled
from ampx.errors import UnsupportedByBackendError
from ampx.protocol import Member

from .gradients import any_nonzero, collect, gradient_of, parameters, unscale


class LossMixer:
    """Keeps apart what carries different scales, for one optimizer."""

    def __init__(self, member: Member, optimizer: Any) -> None:
        self._member = member
        self._optimizer = optimizer
        self.loss_id: int | None = None  # the loss whose gradients were scaled last, once there are several; else None
        self.finite: dict[int, bool] = {}  # finiteness by loss id of gradients that are unscaled already
        self._aside: list[tuple[Any, Any]] = []

    def mixes(self, loss_id: int) -> bool:
        """Return whether gradients of this loss meet those of another."""
        factors = self._member.factors
        return self.loss_id is not None or bool(factors and loss_id not in factors)

    def begin(self, loss_id: int, unscale_first: Callable[[], bool]) -> None:
        """Take unscaled gradients off the parameters before the backward of another loss.

        Args:
            loss_id: That of the loss.
            unscale_first: Unscales those of the first loss, and returns whether they are finite.
        """
        member, owners = self._member, collect(self._optimizer)
        if self.loss_id is None and not any_nonzero(owners):  # cleared by others, such as model.clear_gradients()
            member.drop_factors()
            return
        refuse_unmixable(self._optimizer)
        if self.loss_id is None:
            first = next(iter(member.factors))
            self._note(first, unscale_first())
        member.begin_change()  # which ends with the body: until then gradients are missing
        self.loss_id, member.mixes = loss_id, True
        # Copies: backward may write into the memory of a gradient that it made before.
        self._aside = [(owner, gradient_of(owner).detach().clone()) for owner in owners]
        drop_gradients(self._optimizer)

    def end(self, loss_id: int) -> Unscaled:
        """Unscale the new gradients and add those put aside. Sync: one a dtype."""
        if owners := collect(self._optimizer):  # a backward that gave none does not count for its loss
            self._note(loss_id, bool(unscale(owners, self._member.factors[loss_id])))
        self._bring_back()
        return Unscaled(collect(self._optimizer), all(self.finite.values()))

    def abandon(self) -> None:
        """Drop what an unfinished backward left, and bring back what was put aside."""
        drop_gradients(self._optimizer)
        self._bring_back()

    def _note(self, loss_id: int, finite: bool) -> None:
        self.finite[loss_id] = finite and self.finite.get(loss_id, True)

    @paddle.no_grad()
    def _bring_back(self) -> None:
        aside, self._aside = self._aside, []
        for parameter, gradient in aside:
            new = parameter._grad_ivar()
            if new is None:
                parameter._set_grad_ivar(gradient)
            else:
                new.add_(gradient)

    def drop_aside(self) -> None:
        """Forget gradients put aside, and what was found in them: the user cleared all gradients."""
        self._aside = []
        self.finite = {}

    def reset(self) -> None:
        """Start afresh, after a step."""
        if self.loss_id is not None or self.finite:
            self.loss_id, self._member.mixes = None, False
            self.drop_aside()


def refuse_unmixable(optimizer: Any) -> None:
    """Raise where gradients of several losses could not be kept apart: they are sparse, or a `main_grad`."""
    for parameter in collect(optimizer):
        if getattr(parameter, "main_grad", None) is not None or not gradient_of(parameter).is_dense():
            raise UnsupportedByBackendError(
                f"scale_loss got several loss ids, but parameter {parameter.name!r} has a gradient that is sparse or a "
                f"main_grad, which Paddle cannot put aside; accepted: dense gradients. Use one loss id, or an "
                f"optimizer of its own for this parameter."
            )


def drop_gradients(optimizer: Any) -> None:
    """Leave the parameters of a raw optimizer without gradients; zeros would hide which have none."""
    for parameter in parameters(optimizer):
        parameter.clear_gradient(False)  # not by keyword: the binding does not look at keywords
