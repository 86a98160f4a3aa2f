"""Several losses with loss scales of their own on one trainer.

Gradients of losses with different scales must not be added while they are scaled. So as soon as a second loss id
appears before a step, the gradients so far are unscaled and put aside, the new ones are unscaled right after
their backward, and the two are added.
"""

from __future__ import annotations

from typing import Any

from ampx.backend import Unscaled
from ampx.errors import ProtocolError
from ampx.protocol import Member, NotCopied

from . import gradients
from .casting import switch
from .compat import mx
from .pending import PendingGradients


class LossMixer(NotCopied):
    """Keeps apart what carries different scales, for one raw trainer.

    Its member `mixes` from the second loss id on, until the step.
    """

    def __init__(self, trainer: Any, member: Member, pending: PendingGradients) -> None:
        self._trainer, self._member, self._pending = trainer, member, pending
        # By loss id, the flags of `gradients.all_finite` of gradients that are unscaled already.
        self._flags: dict[int, Any] = {}
        # A parameter, the place of a context, whether a backward had written there, and the gradient.
        self._aside: list[tuple[Any, int, bool, Any]] = []

    def mixes(self, loss_id: int) -> bool:
        """Return whether pending gradients are of other losses, or of several."""
        return self._member.mixes or loss_id not in self._member.factors

    def begin(self, adding: list[Any]) -> None:
        """Take the gradients of other loss ids off the parameters, as unscaled ones."""
        member, pending = self._member, self._pending
        member.begin_change("unscaled")  # entering the body ends it, or leaving it: until then gradients are missing
        with switch.Region(None), mx.autograd.pause():
            if not member.mixes:
                member.mixes = True
                pending.widen(gradients.parameters(self._trainer))
                self._unscale_fresh(next(iter(member.factors)))
                gradients.rescale(adding, 1.0 / member.factor, only_stale=True)
                pending.unscaled = Unscaled(None, self._all_finite())
                if pending.left is not None:
                    pending.left = 1.0
            self._put_aside(adding)
            pending.narrow()

    def end(self, loss_id: int, adding: list[Any]) -> None:
        """Unscale the gradients of a loss's backward, and add what was put aside.

        Raises:
            ProtocolError: MXNet has overwritten gradients of an earlier loss.
        """
        with switch.Region(None), mx.autograd.pause():
            self._pending.widen(gradients.parameters(self._trainer))
            self._unscale_fresh(loss_id)
            self._bring_back(adding)
        self._pending.unscaled = Unscaled(None, self._all_finite())
        self._member.note_unscaled()

    def abandon(self) -> None:
        """Restore what was put aside, without what an unfinished backward wrote."""
        with mx.autograd.pause():
            self._pending.widen(gradients.parameters(self._trainer))
            aside, self._aside = self._aside, []
            for parameter, place, fresh, before in aside:
                parameter._grad[place][:] = before
                parameter._data[place]._fresh_grad = fresh

    def finite_by_loss(self, finite: bool) -> dict[int, bool]:
        """Return which losses were finite, by whether the sum is. Sync: after an overflow, one a loss."""
        if finite:
            return dict.fromkeys(self._flags, True)
        by_loss = {loss_id: bool(flag.asnumpy()) for loss_id, flag in self._flags.items()}
        if all(by_loss.values()):  # each by itself, but not their sum
            return dict.fromkeys(by_loss, False)
        return by_loss

    def reset(self) -> None:
        """Start afresh, after a step."""
        self._member.mixes, self._flags, self._aside = False, {}, []

    def _all_finite(self) -> Any:
        """Return the flag of all losses so far; None before the first."""
        return gradients.combine(list(self._flags.values())) if self._flags else None

    def _unscale_fresh(self, loss_id: int) -> None:
        """Divide what backwards wrote by its loss's scale; a loss whose backward wrote no gradient does not count."""
        if not gradients.any_fresh(self._trainer):
            return
        flag = gradients.unscale(gradients.collect(self._trainer, True), self._member.factors[loss_id])
        before = self._flags.get(loss_id)
        self._flags[loss_id] = flag if before is None else gradients.combine((before, flag))

    def _put_aside(self, adding: list[Any]) -> None:
        self._aside = [
            (parameter, place, data._fresh_grad, gradient.copy())
            for parameter in gradients.parameters(self._trainer)
            for place, (data, gradient) in enumerate(zip(parameter._data, parameter._grad, strict=True))
        ]
        for parameter in adding:
            parameter.zero_grad()
        gradients.mark_stale(self._trainer)

    def _bring_back(self, adding: list[Any]) -> None:
        """Add what was put aside to the gradients; what the new loss did not write is as it was."""
        aside, self._aside = self._aside, []
        names = {parameter.name for parameter in adding}
        overwritten = []
        for parameter, place, fresh, before in aside:
            data, gradient = parameter._data[place], parameter._grad[place]
            if parameter.name in names:
                gradient += before
            elif not data._fresh_grad:
                gradient[:] = before
            elif fresh:
                overwritten.append(parameter.name)
            data._fresh_grad = data._fresh_grad or fresh
        if overwritten:
            raise ProtocolError(
                f"losses of several ids have gradients for {len(overwritten)} parameters with grad_req='write' "
                f"({', '.join(dict.fromkeys(overwritten[:5]))}), and MXNet overwrote the first loss's by the last "
                f"one's; accepted: grad_req='add', or losses that share no parameters. All gradients are cleared: set "
                f"grad_req to 'add' (and call trainer.zero_grad() after every step), and run both losses again."
            )
