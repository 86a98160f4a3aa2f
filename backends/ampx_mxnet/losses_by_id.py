"""Several losses with loss scales of their own on one trainer.

Gradients of losses with different scales must not be added while they are scaled. So as soon as a second loss id
appears before a step, the gradients so far are unscaled and put aside, the new ones are unscaled right after
their backward, and the two are added.
"""

from __future__ import annotations

from typing import Any

from ampx.errors import ProtocolError

from . import gradients


class LossMixer:
    """Keeps apart what carries different scales, for one trainer."""

    def __init__(self) -> None:
        self.active = False  # several loss ids came since the last step
        # By loss id, the flags of `gradients.all_finite` of gradients that are true already.
        self._flags: dict[int, Any] = {}
        # A parameter, the place of a context, whether a backward had written there, and the gradient.
        self._aside: list[tuple[Any, int, bool, Any]] = []

    def note(self, loss_id: int, flag: Any) -> None:
        """Note what unscaling one loss's gradients found."""
        before = self._flags.get(loss_id)
        self._flags[loss_id] = flag if before is None else gradients.combine((before, flag))

    def all_finite(self) -> Any:
        """Return the flag of all losses so far; None before the first."""
        return gradients.combine(list(self._flags.values())) if self._flags else None

    def finite_by_loss(self, finite: bool) -> dict[int, bool]:
        """Return which losses were finite, by whether the sum is. Sync: after an overflow, one a loss."""
        if finite:
            return dict.fromkeys(self._flags, True)
        by_loss = {loss_id: bool(flag.asnumpy()) for loss_id, flag in self._flags.items()}
        if all(by_loss.values()):  # each by itself, but not their sum
            return dict.fromkeys(by_loss, False)
        return by_loss

    def put_aside(self, trainer: Any, adding: list[Any]) -> None:
        """Take unscaled gradients off the parameters before the backward of another loss."""
        self._aside = [
            (parameter, place, data._fresh_grad, gradient.copy())
            for parameter in gradients.parameters(trainer)
            for place, (data, gradient) in enumerate(zip(parameter._data, parameter._grad, strict=True))
        ]
        for parameter in adding:
            parameter.zero_grad()
        gradients.mark_stale(trainer)

    def bring_back(self, adding: list[Any]) -> None:
        """Add what was put aside to the gradients; what the new loss did not write is as it was.

        Raises:
            ProtocolError: MXNet has overwritten gradients of an earlier loss.
        """
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

    def put_back(self) -> None:
        """Restore what was put aside, without what an unfinished backward wrote."""
        aside, self._aside = self._aside, []
        for parameter, place, fresh, before in aside:
            parameter._grad[place][:] = before
            parameter._data[place]._fresh_grad = fresh

    def reset(self) -> None:
        """Start afresh, after a step."""
        self.active, self._flags, self._aside = False, {}, []
