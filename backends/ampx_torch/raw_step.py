"""The raw optimizer's own step: run by the wrapper with casting off, and refused to others while gradients wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampx.errors import RawStepError
from ampx.protocol import Member, NotCopied

from . import casting, fused, unwrapped_steps
from .provenance import OptimizerProvenance


class StepGuard:
    """A step hook of the raw optimizer that raises where gradients carry a loss scale, or wait for the wrapper's step.

    Attributes:
        open: The wrapper itself is stepping.
        begins: It asks to note, when all hooks have run, that the update begins.
    """

    def __init__(self, member: Member, provenance: OptimizerProvenance) -> None:
        self._member, self._provenance = member, provenance
        self.open = self.begins = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise unless the wrapper steps, or the gradients are the user's."""
        if self.begins:
            self.begins = False
            self._member.begin_change()
        if self.open:
            return
        if self._member.pending:
            raise RawStepError(
                f"the raw {type(optimizer).__name__} was stepped while gradients of scale_loss are pending; they would "
                f"be applied scaled or unchecked. Call step() on the object that ampx.wrap_optimizer returned."
            )
        if self._provenance.are_scaled([leaf for group in optimizer.param_groups for leaf in group["params"]]):
            raise RawStepError(
                f"the raw {type(optimizer).__name__} was stepped on gradients that an exception in scale_loss, or a "
                f"scaled loss of other optimizers, left; they would be applied times the loss scale. Call zero_grad() "
                f"before the backward whose gradients it shall apply."
            )


class RawStep(NotCopied):
    """The step of one raw optimizer, which has a guard as long as it is wrapped.

    Attributes:
        incomplete: Of a fused SGD some parameters may have no momentum yet.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        member: Member,
        provenance: OptimizerProvenance,
        device_type: str | None,
    ) -> None:
        """Guard the optimizer.

        Args:
            optimizer: The raw one.
            member: Its place in the protocol.
            provenance: Which of its gradients carry a loss scale.
            device_type: Where casting is switched off for it; None where nothing is cast.
        """
        refusal = vars(optimizer).pop("ampx_refusal", None)  # of prepare, until there is a wrapper
        if refusal is not None:
            refusal.remove()
        self._optimizer, self._member, self._device_type = optimizer, member, device_type
        self._guard = StepGuard(member, provenance)
        self._handle = optimizer.register_step_pre_hook(self._guard)
        self._undo_fused: Callable[[], None] | None = None
        self.expect_momentum()
        unwrapped_steps.note_wrapped(optimizer)

    def unwrap(self) -> None:
        """Leave the raw optimizer as it was."""
        unwrapped_steps.note_wrapped(self._optimizer, False)
        self._handle.remove()
        if self._undo_fused is not None:
            self._undo_fused()

    def fuse(self) -> None:
        """Switch the optimizer to its fused implementation."""
        self._undo_fused = fused.use(self._optimizer)

    def expect_momentum(self) -> None:
        """Note that parameters are new, or their state is."""
        self.incomplete = isinstance(self._optimizer, torch.optim.SGD)

    def run(self, divisor: torch.Tensor | None, overflow: torch.Tensor | None, *args: Any) -> Any:
        """Run the optimizer's step, perhaps with a closure, and forget casts of the weights that it moves.

        The stage is "changing" from there on; where the user has hooks before the step, it is so after them,
        because they may raise without harm.

        Args:
            divisor: What a fused kernel divides gradients by.
            overflow: A flag: where it is set, the kernel changes nothing.
            *args: A closure.
        """
        raw: Any = self._optimizer
        guard, member = self._guard, self._member
        to_kernel = divisor is not None or overflow is not None
        try:
            try:
                guard.open = True
                others = len(raw._optimizer_step_pre_hooks) != 1 or unwrapped_steps.other_hooks()
                # torch wraps every class's step to run hooks, unless the class says that it does so itself
                if others and not args and hasattr(type(raw).step, "__wrapped__"):
                    self._begin_after_hooks()
                elif member.stage != "changing":
                    member.begin_change()
                if self.incomplete:
                    self.incomplete = not fused.complete_momentum(raw)
                if to_kernel:
                    raw.grad_scale, raw.found_inf = divisor, overflow
                if self._device_type is not None and casting.is_on(self._device_type):
                    # Native defect: an optimizer that multiplies matrices would have its own operations cast.
                    with casting.Off(self._device_type):  # which forgets what it cast of weights, too
                        return raw.step(*args)
                result = raw.step(*args)
                casting.forget_weights()
                return result
            finally:
                guard.open = guard.begins = False
                if to_kernel:
                    self._drop_options()
        finally:  # an interruption at the first line of the inner one keeps it from closing the guard
            if guard.open:
                self.reset()

    def _begin_after_hooks(self) -> None:
        """Have the update begin when the user's hooks have run, which may raise without harm until then."""
        if self._member.stage == "changing":
            self._member.note_unscaled()
        hooks: Any = self._optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(self._handle.id)
        self._guard.begins = True

    def reset(self) -> None:
        """Put right what an exception may have left."""
        self._guard.open = self._guard.begins = False
        self._drop_options()

    def _drop_options(self) -> None:
        options = vars(self._optimizer)
        options.pop("grad_scale", None)
        options.pop("found_inf", None)
