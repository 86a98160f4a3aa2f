"""What stands where a trainer has torch's GradScaler: every optimizer with a loss scale of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ampx.errors import NotWrappedError, ProtocolError, StateError
from ampx.foreign_states import import_state
from ampx.saved_state import has_schema
from ampx.session import Amp
from ampx_torch.reach import bring_together, leaves_of
from ampx_torch.step import AmpOptimizer


class TrainerScaler:
    """Scales the losses of a trainer, and steps its optimizers, by ampx.

    A trainer keeps the optimizers that the user made; beside each stands one that ampx wrapped, which unscales,
    checks, steps and has the loss scale. It has the methods of `torch.amp.GradScaler` that trainers call. Native
    defect: one GradScaler, updated between two optimizers, divides the gradients of the second by another scale than
    they were multiplied by.
    """

    def __init__(self, amp: Amp, **options: Any) -> None:
        """Serve the session's optimizers.

        Args:
            amp: What `ampx.init` returned.
            **options: For `amp.wrap_optimizer`.
        """
        self.amp = amp
        self._options = options
        self._wrapped: dict[int, AmpOptimizer] = {}  # by the id of the optimizer that the trainer has

    def manage(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Wrap those that are not yet. An optimizer that the user wrapped serves as it is."""
        for optimizer in optimizers:
            if id(optimizer) not in self._wrapped:
                wrapped = isinstance(optimizer, AmpOptimizer)
                self._wrapped[id(optimizer)] = (
                    optimizer if wrapped else self.amp.wrap_optimizer(optimizer, **self._options)
                )

    def wrapped(self, optimizer: torch.optim.Optimizer) -> AmpOptimizer:
        """Return what ampx has beside an optimizer of the trainer.

        Raises:
            NotWrappedError: The trainer was not given this optimizer.
        """
        wrapped = self._wrapped.get(id(optimizer))
        if wrapped is None:
            raise NotWrappedError(
                f"the trainer steps a {type(optimizer).__name__} that ampx was not told of; accepted: those that the "
                f"trainer prepared, or that manage() was called with. Call manage([optimizer]) first."
            )
        return wrapped

    @contextmanager
    def scaling(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the loss, scaled for the optimizers that it reaches; its backward is the body.

        Raises:
            ProtocolError: There are no optimizers.
        """
        optimizers = self._reached(loss)
        if not optimizers:
            raise ProtocolError(
                f"a loss is differentiated, but it reaches no parameter of the {len(self._wrapped)} optimizers that "
                f"ampx was told of; accepted: losses of parameters that they hold. Prepare the optimizer with the "
                f"trainer, or call manage([optimizer]), before the first backward."
            )
        if self.amp.enabled:
            bring_together(self.amp.backend, optimizers)
        with self.amp.scale_loss(loss, optimizers) as scaled:
            yield scaled

    def _reached(self, loss: torch.Tensor) -> list[AmpOptimizer]:
        optimizers = list(self._wrapped.values())
        if len(optimizers) == 1:  # looking takes time
            return optimizers
        leaves, hidden = leaves_of([loss])
        if hidden:
            return optimizers
        return [
            optimizer for optimizer in optimizers if any(id(parameter) in leaves for parameter in optimizer.leaves())
        ]

    # -- what trainers call of a GradScaler ----------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> ScaledLoss:
        """Return an object with the loss's backward only, so that no code sees a scaled loss by mistake."""
        return ScaledLoss(self, loss)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer; again, or with none pending, it does nothing.

        Sync: at most one a device.
        """
        wrapped = self.wrapped(optimizer)
        if wrapped.ampx_member.pending:  # a trainer that clips unscales all of its optimizers
            wrapped.ampx_unscale()

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        """Unscale if not done, check, apply or skip, and move this optimizer's scale; see `AmpOptimizer.step`."""
        return self.wrapped(optimizer).step(closure)

    def update(self, new_scale: Any = None) -> None:
        """Do nothing: the step has moved the scale of its optimizer.

        Raises:
            ProtocolError: A scale is asked for.
        """
        if new_scale is not None:
            raise ProtocolError(
                f"update got new_scale={new_scale!r}, but every optimizer moves a loss scale of its own; accepted: "
                f"nothing. Start with ampx.init(loss_scale=ampx.LossScale(init_scale=…))."
            )

    def get_scale(self) -> float:
        """Return the smallest loss scale. Sync: where one lives on the device."""
        return min((wrapped.loss_scale for wrapped in self._wrapped.values()), default=1.0)

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return self.amp.enabled

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scales of the optimizers in the order in which they came; see `Amp.state_dict`."""
        parts = [self.amp.state_dict(wrapped) for wrapped in self._wrapped.values()]
        if not parts:
            return {}
        return {**parts[0], "groups": [group for part in parts for group in part["groups"]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over loss scales: what `state_dict` returned, or that of the GradScaler which the trainer had before.

        Raises:
            StateError: There are more or fewer loss scales than optimizers, or a value is not accepted.
        """
        if not state or not self.amp.enabled:
            return
        wrapped = list(self._wrapped.values())
        if not has_schema(state):  # one GradScaler served all
            state = import_state(state)
            state = {**state, "groups": state["groups"] * len(wrapped)}
        if len(state["groups"]) != len(wrapped):
            raise StateError(
                f"the checkpoint has {len(state['groups'])} loss scales, but the trainer has {len(wrapped)} "
                f"optimizers; accepted: as many. Load it when the trainer has prepared the optimizers of the saved run."
            )
        for optimizer, group in zip(wrapped, state["groups"], strict=True):
            self.amp.load_state_dict({**state, "groups": [group]}, optimizer)


class ScaledLoss:
    """A loss that is scaled while its backward runs."""

    def __init__(self, scaler: TrainerScaler, loss: torch.Tensor) -> None:
        self._scaler = scaler
        self._loss = loss

    def backward(self, **kwargs: Any) -> None:
        """Run backward, with torch's options."""
        with self._scaler.scaling(self._loss) as scaled:
            scaled.backward(**kwargs)
