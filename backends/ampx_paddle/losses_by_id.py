"""Several losses with loss scales of their own on one optimizer.

Gradients of losses with different scales must not be added while they are scaled. So as soon as a second loss id
appears before a step, the gradients so far are unscaled and put aside, the new ones are unscaled right after
their backward, and the two are added.
"""

from __future__ import annotations

from typing import Any

import paddle

from ampx.errors import UnsupportedByBackendError

from .gradients import collect, gradient_of, parameters


class LossMixer:
    """Keeps apart what carries different scales, for one optimizer."""

    def __init__(self) -> None:
        self.loss_id: int | None = None  # the loss whose gradients were scaled last, once there are several; else None
        self.finite: dict[int, bool] = {}  # finiteness by loss id of gradients that are true already
        self._aside: list[tuple[Any, Any]] = []

    def note(self, loss_id: int, finite: bool) -> None:
        """Note what unscaling one loss's gradients found."""
        self.finite[loss_id] = finite and self.finite.get(loss_id, True)

    def put_aside(self, optimizer: Any, loss_id: int) -> None:
        """Take the unscaled gradients off the parameters before the backward of another loss."""
        self.loss_id = loss_id
        # Copies: backward may write into the memory of a gradient that it made before.
        self._aside = [(parameter, gradient_of(parameter).detach().clone()) for parameter in collect(optimizer)]
        drop_gradients(optimizer)

    @paddle.no_grad()
    def bring_back(self) -> None:
        """Add what was put aside to the gradients."""
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

    @property
    def used(self) -> bool:
        """Whether there is anything to `reset`."""
        return self.loss_id is not None or bool(self.finite)

    def reset(self) -> None:
        """Start afresh, after a step."""
        self.loss_id = None
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
