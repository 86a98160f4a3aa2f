"""The optimizer that Paddle sees: it delegates to the raw one and steps it only with true, finite gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ampx import sessions
from ampx.group import Member
from ampx.optimizer import GenericOptimizer

from .delegation import DelegatingOptimizer
from .gradients import any_nonzero, collect, gradient_of, name_nonfinite

if TYPE_CHECKING:
    from .backend import PaddleBackend

# What is the wrapper's own; everything else is read and set on the raw optimizer.
_OWN: Final = frozenset(
    ("optimizer", "ampx_member", "_backend", "_max_grad_norm", "_max_grad_value", "_unscaled", "_norm", "__weakref__")
)


class AmpOptimizer(GenericOptimizer, DelegatingOptimizer):
    """A Paddle optimizer with its own loss scale.

    Everything but stepping and clearing is the raw optimizer's; `state_dict` holds nothing of ampx and loads into
    plain Paddle (`amp.state_dict()` holds the loss scale).

    Attributes:
        ampx_member: Its place in the protocol.
    """

    def __init__(self, backend: PaddleBackend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        """Made by `ampx.wrap_optimizer`."""
        super().__init__(backend, optimizer, member, options)
        self._attach()

    def _attach(self) -> None:
        """Tell the group whom to send events to and whom to ask for names; neither can be copied."""
        group = self.ampx_member.group
        group.emit = sessions.emit
        culprits = weakref.WeakMethod(self._culprits)
        group.culprits = lambda: found() if (found := culprits()) is not None else ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the raw optimizer what is not the wrapper's own."""
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def step(self, grads: Any = None) -> None:
        """Unscale if not done, check, apply or skip, move the loss scale.

        Args:
            grads: Refused: gradients hang on the parameters, and closures are not supported.

        Raises:
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.

        Sync: one a dtype, as Paddle's GradScaler; where nothing is pending, one a gradient.
        """
        member = self.ampx_member
        if grads is None and member.group.enabled and member.stage == "idle":
            found = collect(self.optimizer)
            if found and not any_nonzero(found):
                # `clear_grad` leaves zeros by default: nothing was computed since, so there is nothing to count.
                self._nothing_to_do()
                return
        super().step(grads)

    def minimize(
        self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[None, list[tuple[Any, Any]]]:
        """Step, as Paddle's `minimize` does in eager mode after `backward`.

        Args:
            loss: Not looked at: backward ran inside `scale_loss`.
            startup_program: Not looked at in eager mode.
            parameters: Refused, because the optimizer's own parameters were checked.
            no_grad_set: Refused, likewise.

        Returns:
            None, and the pairs of parameters and gradients.

        Raises:
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.
            UnsupportedByBackendError: `parameters` or `no_grad_set` was passed.

        Sync: as `step`.
        """
        if parameters is not None or no_grad_set is not None:
            self._backend.refuse("parameters and no_grad_set of minimize")
        self.step()
        return None, [(parameter, gradient_of(parameter)) for parameter in collect(self.optimizer)]

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget all gradients, pending ones included; Paddle leaves zeros unless told otherwise."""
        self.optimizer.clear_grad(set_to_zero)
        self._unscaled = self._norm = None
        if self.ampx_member.stage in ("scaled", "unscaled"):
            self.ampx_member.forget()

    clear_gradients = clear_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, pending ones included."""
        self.clear_grad(set_to_zero=not set_to_none)

    def ampx_notice_cleared(self) -> None:
        """Forget true gradients that model.clear_gradients() dropped: a step skipped by hand. Sync: one a gradient."""
        if not any_nonzero(collect(self.optimizer)):
            self.clear_grad()

    def _culprits(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in name_nonfinite(self.optimizer, None))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy; gradients did not travel, so nothing is pending."""
        self.__dict__.update(state)
        self._unscaled = self._norm = None
        self._attach()
        if self.ampx_member.stage != "idle":
            self.ampx_member.forget()

    def __repr__(self) -> str:
        """Show the raw optimizer's class and the loss scale's configuration."""
        return f"AmpOptimizer({type(self.optimizer).__name__}, {self.ampx_member.group.config!r})"
