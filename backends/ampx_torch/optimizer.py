"""The optimizer that torch sees: it delegates to the raw one and steps it only with true, finite gradients.

A delegating subclass, because schedulers, hooks, deepcopy, pickle and distributed checkpoints all accept it;
patching the raw optimizer's `step` would be lost by copies and shadowed by schedulers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ampx import sessions
from ampx.events import UNCHECKED, StepResult
from ampx.group import Member
from ampx.optimizer import WrappedOptimizer

from . import casting, masters
from .closures import evaluates_once, step_with_closure
from .debug import nonfinite_parameters
from .delegation import DelegatingOptimizer
from .gradients import GradientSet, clip
from .guard import StepGuard
from .ledger import DeviceLedger
from .losses_by_id import LossMixer
from .refusals import refuse_half


class AmpOptimizer(WrappedOptimizer, DelegatingOptimizer):
    """A torch optimizer with its own loss scale.

    Everything but `step` and `zero_grad` is the raw optimizer's; `state_dict` holds nothing of ampx and loads
    into plain torch (`amp.state_dict()` holds the loss scale).

    Attributes:
        ampx_member: Its place in the protocol.
        masters: Float32 copies of low-precision parameters (O2), or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, member: Member, options: Mapping[str, Any]) -> None:
        """Made by `ampx.wrap_optimizer`."""
        self.optimizer = optimizer
        self.ampx_member = member
        self.masters = masters.of(optimizer)
        self._max_norm: float | None = options["max_grad_norm"]
        self._max_value: float | None = options["max_grad_value"]
        self._process_group = options.get("process_group")
        plan = options["plan"]
        self.device_type: str | None = None if plan is None else plan.device
        self._attach()

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        # Native defect: an optimizer that multiplies matrices would have its own operations cast.
        self._casting_off = nullcontext() if self.device_type is None else casting.off(self.device_type)
        self.gradients = GradientSet(self.optimizer)
        self.mixer = LossMixer(self)
        # Finiteness by loss id of gradients that are true already: bools, or flags on the device.
        self._checked: dict[int, Any] = {}
        self._norm: Any = None
        self._guard = StepGuard(self.ampx_member)
        self._guard_handle = self.optimizer.register_step_pre_hook(self._guard)
        group = self.ampx_member.group
        group.emit = sessions.emit
        culprits = weakref.WeakMethod(self._culprits)
        group.culprits = lambda: found() if (found := culprits()) is not None else ()

    # -- the step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale if not done, check, apply or skip, move the loss scale.

        Args:
            closure: As torch's optimizers take it; it calls backward inside `scale_loss`. Optimizers that
                evaluate it several times (LBFGS) are put back as they were when an evaluation overflows.

        Returns:
            What the closure returned first; None without one.

        Raises:
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.

        Sync: one a device, as torch's GradScaler; none where the scale lives on the device (fused optimizers on
        an accelerator).
        """
        member = self.ampx_member
        if not member.group.enabled:
            loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
            member.result = UNCHECKED
            return loss
        if closure is not None and not evaluates_once(self.optimizer):
            return step_with_closure(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self.ready_gradients()
        if gradients or (self._process_group is not None and member.stage != "idle"):
            self.check_and_unscale(gradients)
            self._finish()
        else:
            self._step_without_gradients()
        return loss

    def ready_gradients(self) -> list[list[torch.Tensor]]:
        """List the gradients that a step would apply, by device and dtype; raise where they were never scaled."""
        stage = self.ampx_member.stage
        if stage == "scaled" and self.masters is not None:
            self.masters.pull_gradients()
        gradients = self.gradients.collect()
        if stage == "inside" or (stage == "idle" and any(bool(one.any()) for bucket in gradients for one in bucket)):
            self.ampx_member.check_step()
        if stage == "idle":
            # Distributed checkpoints step on gradients of zeros to make the optimizer create its state.
            return []
        return gradients

    def check_and_unscale(self, gradients: list[list[torch.Tensor]] | None = None) -> None:
        """Make pending scaled gradients true and note their finiteness; nothing where that is done.

        Args:
            gradients: What `ready_gradients` gave; looked up where it is None.
        """
        member = self.ampx_member
        if member.stage != "scaled":
            return
        if gradients is None:
            gradients = self.ready_gradients()
        on_device = isinstance(member.group.ledger, DeviceLedger)
        loss_id = self.mixer.current_loss_id()
        flags = self.gradients.unscale(gradients, member.factors[loss_id], fresh=on_device)
        if self._process_group is not None:
            flags = [self._agree(flags)]
        finite: Any = self.gradients.combine(flags) if on_device else self.gradients.finite(flags)
        if loss_id in self._checked:
            earlier = self._checked[loss_id]
            finite = torch.maximum(earlier, finite) if on_device else earlier and finite
        self._checked[loss_id] = finite
        member.stage = "unscaled"

    def _agree(self, flags: list[torch.Tensor]) -> torch.Tensor:
        """Make all processes of the group see an overflow that one of them has; one flag travels."""
        flag = self.gradients.combine(flags)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._process_group)
        return flag

    def clip_gradients(self) -> None:
        """Clip the true gradients as `wrap_optimizer` was asked to."""
        if self._max_norm is None and self._max_value is None:
            return
        norm = clip(self.gradients.parameters(), self._max_norm, self._max_value)
        self._norm = norm if self._norm is None else self._norm

    def _finish(self) -> None:
        """Apply or skip with the finiteness found, then close the step."""
        checked, self._checked = self._checked, {}
        if isinstance(self.ampx_member.group.ledger, DeviceLedger):
            self.clip_gradients()
            self._run_fused(self.gradients.combine(list(checked.values())))
        elif all(checked.values()):
            self.clip_gradients()
            self.run_raw()
        else:
            # A scheduler made on the raw optimizer warns unless it has seen a step; skipping is no mistake.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.close_step(checked)

    def run_raw(self, *args: Any) -> Any:
        """Run the raw optimizer's step with casting off, and drop weight copies that are stale after it."""
        self._guard.open = True
        try:
            with self._casting_off:
                result = self.optimizer.step(*args)
        finally:
            self._guard.open = False
        if self.masters is not None:
            self.masters.push_weights()
        casting.forget_weights()
        return result

    def _run_fused(self, flag: torch.Tensor) -> None:
        """Run a fused optimizer, whose kernel leaves everything as it is where the flag is set."""
        raw: Any = self.optimizer
        raw.grad_scale, raw.found_inf = None, flag
        try:
            self.run_raw()
        finally:
            del raw.grad_scale, raw.found_inf

    def close_step(self, checked: dict[int, Any]) -> None:
        """Note the step's outcome and move the loss scale."""
        norm, self._norm = self._norm, None
        self.mixer.reset()
        ledger = self.ampx_member.group.ledger
        if isinstance(ledger, DeviceLedger):
            checked = {loss_id: ledger.flag(found) for loss_id, found in checked.items()}
        self.ampx_member.finish(checked, norm)

    def _step_without_gradients(self) -> None:
        """Step the raw optimizer, which has nothing to do, and forget the step."""
        self.run_raw()
        group = self.ampx_member.group
        group.resolve()
        state = group.states[0]
        self._reset()
        self.ampx_member.forget(StepResult(False, True, state.scale, state.scale, state.consecutive_skips))

    def forget(self) -> None:
        """Drop pending gradients without counting a step."""
        self._reset()
        self.ampx_member.forget()

    def checked_finite(self) -> bool:
        """Tell whether all gradients checked since the last step are finite. Sync: where the scale is on the device."""
        checked, self._checked = self._checked, {}
        if isinstance(self.ampx_member.group.ledger, DeviceLedger):
            return not any(bool(flag) for flag in checked.values())
        return all(checked.values())

    def _reset(self) -> None:
        self._checked = {}
        self._norm = None
        self.mixer.reset()

    # -- what core asks ------------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Make the pending gradients true. Sync: one a device; none where the scale lives on the device."""
        if not self.ampx_member.group.enabled or self.ampx_member.stage == "unscaled":
            return
        self.ampx_member.check_step()
        self.check_and_unscale()

    def ampx_clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Unscale if not done, clip, and give the norm before clipping as a float32 scalar tensor."""
        self.ampx_unscale()
        norm = clip(self.gradients.parameters(), max_norm, None)
        assert norm is not None
        self._norm = norm if self._norm is None else self._norm
        return norm

    def ampx_before_backward(self, loss_id: int) -> None:
        """Put gradients of other losses aside."""
        self.mixer.before(loss_id)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Bring them back."""
        self.mixer.after(loss_id)

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Bring them back after an exception."""
        self.mixer.abandon()

    def _culprits(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in nonfinite_parameters(self, None))

    # -- what torch asks -----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, pending ones included."""
        self.optimizer.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        if self.ampx_member.stage in ("scaled", "unscaled"):
            self.forget()

    def __repr__(self) -> str:
        """Show the raw optimizer and the loss scale's configuration."""
        return f"AmpOptimizer({self.optimizer!r}, {self.ampx_member.group.config!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the raw optimizer.

        Raises:
            LowPrecisionParametersError: It holds float16 parameters.
        """
        candidate = param_group.get("params", ())
        listed = [candidate] if isinstance(candidate, torch.Tensor) else list(candidate)
        plain = [one[1] if isinstance(one, tuple) else one for one in listed]
        refuse_half([{**param_group, "params": plain}])
        self.optimizer.add_param_group({**param_group, "params": listed})

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what `_attach` makes, and a scheduler's patch of `step`."""
        made = {
            "gradients",
            "_casting_off",
            "mixer",
            "_checked",
            "_norm",
            "_guard",
            "_guard_handle",
            "step",
            "_opt_called",
        }
        return {key: value for key, value in self.__dict__.items() if key not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy or a pickle; gradients did not travel, so nothing is pending."""
        self.__dict__.update(state)
        self._attach()
        if self.ampx_member.stage != "idle":
            self.ampx_member.forget()

    # Optimizer._patch_step_function would otherwise wrap `step` a second time for profiling.
    step.hooked = True  # type: ignore[attr-defined]
