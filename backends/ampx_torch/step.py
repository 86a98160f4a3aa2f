"""The step of a wrapped optimizer: unscale, check, clip, apply or skip, move the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ampx.errors import LowPrecisionParametersError
from ampx.events import UNCHECKED, StepResult
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import HostLedger

from . import casting, folded_step
from .closures import evaluates_once, step_with_closure
from .delegation import DelegatingOptimizer
from .device_scale import TensorLedger
from .fused import check_momentum, complete_momentum, makes_momentum
from .gradients import GradientSet, clip, reads_free
from .guard import StepGuard
from .losses_by_id import LossMixer
from .prepare.masters import MasterWeights


class Stepping(WrappedOptimizer, DelegatingOptimizer):
    """The half of a wrapped optimizer that steps; `AmpOptimizer` adds how it is made, copied and seen by torch.

    Attributes:
        masters: Float32 copies of low-precision parameters (O2), or None.
        device_type: Where casting is switched off for the raw optimizer; None where nothing is cast.
        gradients: The gradients behind the parameter groups.
        mixer: Keeps losses with scales of their own apart.
        revealed: The true gradients may have changed since they were tested: the step tests them again.
    """

    masters: MasterWeights | None
    device_type: str | None
    gradients: GradientSet
    mixer: LossMixer
    _max_norm: float | None
    _max_value: float | None
    _process_group: Any
    _casting_off: AbstractContextManager[Any]
    _guard: StepGuard
    _guard_handle: Any
    # Finiteness by loss id of gradients that are true already: bools, or flags on a device that nobody has read.
    _checked: dict[int, Any]
    _norm: Any
    revealed: bool
    # Whether the true gradients were clipped as `wrap_optimizer` was asked to.
    _clipped: bool
    # Fused SGD: some parameters have no momentum yet.
    _incomplete: bool

    @property
    def on_device(self) -> bool:
        """Whether the loss scale lives on the device."""
        # By type: asking an abstract class takes longer, and every step asks several times.
        return type(self.ampx_member.group.ledger) is not HostLedger

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale if not done, check, apply or skip, move the loss scale.

        Args:
            closure: As torch's optimizers take it; it calls backward inside `scale_loss`. Optimizers that
                evaluate it several times (LBFGS) are put back as they were when an evaluation overflows.

        Returns:
            What the closure returned first; None without one.

        Raises:
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.
            ProtocolError: A call before was interrupted by an exception; `zero_grad` starts over.

        Sync: one a device, as torch's GradScaler; none where the scale lives on the device (fused optimizers on
        an accelerator).
        """
        member = self.ampx_member
        if not member.group.enabled:
            loss = self._step_disabled(closure)
            member.note_result(UNCHECKED)
            return loss
        if closure is not None and not evaluates_once(self.optimizer):
            return step_with_closure(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self.pending_gradients()
        if self._incomplete and gradients:
            check_momentum(self.optimizer)
        if gradients or (self._process_group is not None and member.stage != "idle"):
            folds = self._max_norm is not None or self.gradients.reads_fast  # else it never pays
            if not (folds and self._step_folded(gradients)):
                if member.stage == "scaled":
                    self.divide(gradients)
                elif self.revealed:
                    self.test_again(gradients)
                self._finish()
        else:
            self._step_without_gradients()
        return loss

    def _step_disabled(self, closure: Callable[[], Any] | None) -> Any:
        """Step the raw optimizer, after clipping as `wrap_optimizer` was asked to."""
        max_norm, max_value, parameters = self._max_norm, self._max_value, self.gradients.parameters
        if max_norm is None and max_value is None:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        if closure is None:
            clip(parameters(), max_norm, max_value)
            return self.optimizer.step()

        def clipped() -> Any:
            loss = closure()
            clip(parameters(), max_norm, max_value)
            return loss

        return self.optimizer.step(clipped)

    def collect(self) -> list[list[torch.Tensor]]:
        """List the gradients that exist, pulled from a low-precision model where there is one."""
        if self.masters is not None and self.ampx_member.stage in ("inside", "scaled", "interrupted"):
            self.masters.pull_gradients()
        return self.gradients.collect()

    def pending_gradients(self) -> list[list[torch.Tensor]]:
        """List the gradients that a counted step can use; raise where they were never scaled."""
        member = self.ampx_member
        if member.stage in ("inside", "interrupted"):
            member.check_step()
        if self.leftovers.notes and member.stage != "idle":
            self.bring_together()
        gradients = self.collect()
        if member.stage == "idle":
            # Distributed checkpoints step on gradients of zeros to make the optimizer create its state.
            if any(one.any() for bucket in gradients for one in bucket):
                member.check_step()
            if self.masters is not None and self.masters.any_gradient():
                member.check_step()
            return []
        return gradients

    def check_and_unscale(self, reads: bool = True) -> None:
        """Make pending scaled gradients true and note their finiteness; test true ones that may have changed.

        Args:
            reads: As in `divide`.
        """
        member = self.ampx_member
        if member.stage == "scaled" or (member.stage == "unscaled" and self.revealed):
            if self.leftovers.notes:
                self.bring_together()
            if member.stage == "scaled":
                self.divide(self.collect(), reads)
            else:
                self.test_again(self.collect())
            member.note_unscaled()

    def divide(self, gradients: list[list[torch.Tensor]], reads: bool = True) -> None:
        """Divide gradients by the scale they carry and note their finiteness; the stage is "interrupted" after it.

        Args:
            gradients: What `collect` gave.
            reads: Read the finiteness now, if the scale is on the host; False leaves it to the step where reading
                would wait for a device.
        """
        member, on_device = self.ampx_member, self.on_device
        unread = on_device or not (reads or reads_free([gradient for bucket in gradients for gradient in bucket]))
        loss_id = next(iter(member.factors)) if self.mixer.loss_id is None else self.mixer.loss_id
        factor = member.factors[loss_id]
        member.begin_change()
        try:
            grows = on_device and self._may_grow(factor, loss_id)
            flags = self.gradients.unscale(gradients, factor, unread or self.mixer.waits, grows)
        except LowPrecisionParametersError:  # a refusal comes before anything is divided
            member.end_change()
            raise
        if self.mixer.waits:
            finite: Any = self._add_up(flags)
        else:
            if self._process_group is not None:
                flags = [self._agree(self.gradients.combine(flags))]
            finite = self.gradients.combine(flags) if unread else self.gradients.finite(flags)
        if loss_id in self._checked:
            earlier = self._checked[loss_id]
            finite = torch.maximum(earlier, finite) if on_device else earlier and finite
        self._checked[loss_id] = finite

    def test_again(self, gradients: list[list[torch.Tensor]]) -> None:
        """Test true gradients again: somebody may have written to them since. The stage is "interrupted" after it.

        What is not finite counts for the first loss; for none, where one had overflowed before.
        """
        self.ampx_member.begin_change()
        unread = self._unread()
        if len(unread) < len(self._checked) and not all(self._checked.values()):
            return  # the step is skipped, whatever they are
        loss_id = next(iter(self._checked), 0)
        flag = self.gradients.combine(self.gradients.unscale(gradients, 1.0, fresh=True))
        if self._process_group is not None:
            flag = self._agree(flag)
        if not self.on_device:
            self._checked[loss_id] = not self.gradients.combine([*unread, flag]).item()
        elif unread:
            flag = torch.where(self.gradients.combine(unread) == 0, flag.to(unread[0].device), 0.0)
            self._checked[loss_id] = self.gradients.combine([unread[0], flag])
        else:
            self._checked[loss_id] = flag

    def _unread(self) -> list[torch.Tensor]:
        """List the flags that nobody has read."""
        return [finite for finite in self._checked.values() if isinstance(finite, torch.Tensor)]

    def divide_new(self) -> None:
        """Divide what the backward of one of several losses gave, and add what was put aside.

        A backward that gave no gradient does not count for its loss.
        """
        gradients = self.collect()
        if gradients or self._process_group is not None:  # others of the group may have some
            self.divide(gradients)
        self.mixer.bring_back()

    def _add_up(self, flags: list[torch.Tensor]) -> Any:
        """Add the gradients of other losses, which were put aside, and test the sum; return the finiteness.

        A sum that overflows though its terms are finite counts for the loss that came last.
        """
        self.mixer.bring_back()
        sums = self.gradients.unscale(self.gradients.collect(), 1.0, fresh=True)  # tests them and changes none
        both = torch.stack([self.gradients.combine(flags), self.gradients.combine(sums)])
        if self._process_group is not None:
            both = self._agree(both)
        earlier = list(self._checked.values())
        if self.on_device:
            fine = self.gradients.combine([*earlier, both[0]]) == 0
            return torch.maximum(both[0], torch.where(fine, both[1], 0.0))
        own, total = both.tolist()
        return not own and not (total and all(earlier))

    def _agree(self, flag: torch.Tensor) -> torch.Tensor:
        """Make all processes of the group see an overflow that one of them has."""
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._process_group)
        return flag

    def _may_grow(self, scale: Any, loss_id: int) -> bool:
        """Return whether a scale on the device may be below 1."""
        group = self.ampx_member.group
        if scale is not group.ledger.factor(group, loss_id):
            return True  # another optimizer's
        config = group.config
        lowest = config.min_scale if config.dynamic else config.init_scale
        return min([lowest, *(state.scale for state in group.states.values())]) < 1.0

    def clip_gradients(self) -> None:
        """Clip the true gradients as `wrap_optimizer` was asked to; once, should the step be tried again."""
        if not self._clipped and (self._max_norm is not None or self._max_value is not None):
            self._clip(self._max_norm, self._max_value)
            self._clipped = True

    def _clip(self, max_norm: float | None, max_value: float | None) -> torch.Tensor | None:
        """Clip true gradients; those that are not finite stay, so that they can be told from the others."""
        unread = self._unread()
        overflow: Any = self.gradients.combine(unread) if unread else None
        if not unread and not all(self._checked.values()):
            max_value, overflow = None, True
        member = self.ampx_member
        begins = member.stage != "interrupted"
        if begins:
            member.begin_change()
        norm = clip(self.gradients.parameters(), max_norm, max_value, overflow)
        self._norm = norm if self._norm is None else self._norm
        if begins:
            member.end_change()
        return norm

    def _step_folded(self, gradients: list[list[torch.Tensor]]) -> bool:
        """Close the step with a kernel that unscales and clips, where nobody can tell; False: nothing was done."""
        member, found = self.ampx_member, None
        if member.stage == "scaled" and self._may_fold() and folded_step.accepts(self.optimizer, gradients):
            scale = member.factor
            if not self.on_device:
                # One backward with an optimizer whose scale is on a device gives a tensor, whose value is not known.
                # A quotient by less than 1 may overflow, which the kernel would not see.
                if not isinstance(scale, torch.Tensor) and scale >= 1.0:
                    found = folded_step.on_host(gradients, scale, self._max_norm)
            elif (
                self._max_norm is not None
                and not self._may_grow(scale, next(iter(member.factors)))
                and not makes_momentum(self.optimizer)
            ):
                found = folded_step.on_device(gradients, scale, self._max_norm)
        if found is None:
            return False
        member.begin_change()  # gradients that the kernel divides must not be used again, should it raise
        self._run_fused(found.overflow, found.divisor)
        self._norm = found.norm
        self.close_step({next(iter(member.factors)): True if found.overflow is None else found.overflow})
        return True

    def _may_fold(self) -> bool:
        """Return whether there is but one loss to unscale, and folding the rest of the step pays."""
        if self._checked or self.mixer.loss_id is not None:
            return False
        if self._max_value is not None or self._process_group is not None:
            return False
        return self._max_norm is not None or (self.gradients.reads_fast and not self.on_device)

    def _finish(self) -> None:
        """Apply or skip with the finiteness found, then close the step."""
        if self.on_device:
            self.clip_gradients()
            flag = self.gradients.combine(list(self._checked.values()))
            if makes_momentum(self.optimizer) and bool(flag):
                self.skip()
            else:
                self._run_fused(flag)
        elif all(self._checked.values()):
            self.clip_gradients()
            self.run_raw()
        else:
            self.skip()
        checked, self._checked = self._checked, {}
        self.close_step(checked)

    def skip(self) -> None:
        """Leave the raw optimizer alone."""
        self.ampx_member.begin_change()
        # A scheduler made on the raw optimizer would warn that it saw no step: skipping is no mistake.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def run_raw(self, *args: Any) -> Any:
        """Run the raw optimizer's step with casting off, and drop weight copies that are stale after it.

        The stage is "interrupted" from there on. Where the user has hooks before the step, it is so after them, because
        they may raise without harm.

        Args:
            *args: A closure, whose evaluations have stages of their own, or nothing.
        """
        raw, guard, member = self.optimizer, self._guard, self.ampx_member
        guard.open = True
        try:
            others = len(raw._optimizer_step_pre_hooks) != 1 or _global_optimizer_pre_hooks
            # torch wraps every class's step to run hooks, unless the class says that it does so itself
            if others and not args and hasattr(type(raw).step, "__wrapped__"):
                if member.stage == "interrupted":
                    member.note_unscaled()
                raw._optimizer_step_pre_hooks.move_to_end(self._guard_handle.id)
                guard.begins = True
            elif member.stage != "interrupted":
                member.begin_change()
            if self._incomplete:
                self._incomplete = not complete_momentum(raw)
            with self._casting_off:
                result = raw.step(*args)
        finally:
            guard.open = guard.begins = False
        if self.masters is not None:
            self.masters.push_weights()
        casting.forget_weights()
        return result

    def _run_fused(self, flag: torch.Tensor | None, divisor: torch.Tensor | None = None) -> None:
        """Run a fused optimizer: its kernel divides gradients, and changes nothing where the flag is set."""
        raw: Any = self.optimizer
        try:
            raw.grad_scale, raw.found_inf = divisor, flag
            self.run_raw()
        finally:
            self._drop_kernel_options()

    def _drop_kernel_options(self) -> None:
        options = vars(self.optimizer)
        options.pop("grad_scale", None)
        options.pop("found_inf", None)

    def close_step(self, checked: dict[int, Any]) -> None:
        """Note the step's outcome and move the loss scale."""
        norm, self._norm = self._norm, None
        self.leftovers.notes, on_device = {}, self.on_device
        if not on_device and False in checked.values():
            self.leftovers.note(self.leaves(), None)
        elif self.masters is not None:  # only the masters' gradients became true
            factor = self.ampx_member.factor if self.mixer.loss_id is None else None
            if type(factor) is not float or factor != 1.0:
                self.leftovers.note(self.masters.model_parameters(), factor)
        self.revealed = False
        self._clipped = False
        self.mixer.reset(self)
        if on_device:
            ledger = cast("TensorLedger", self.ampx_member.group.ledger)
            checked = {loss_id: ledger.flag(found) for loss_id, found in checked.items()}
        self.ampx_member.finish(checked, norm)

    def _step_without_gradients(self) -> None:
        """Step the raw optimizer, which has nothing to do or only zeros to apply, without counting the step."""
        self.run_raw()
        group = self.ampx_member.group
        group.resolve()
        state = group.states[0]
        applied = bool(self.gradients.collect())
        self._reset()
        self.ampx_member.forget(StepResult(applied, True, state.scale, state.scale, state.consecutive_skips))

    def forget(self) -> None:
        """Drop pending gradients without counting a step."""
        self._reset()
        self.ampx_member.forget()

    def restart(self) -> None:
        """Forget pending gradients that another evaluation replaces, within one step."""
        self._checked = {}
        self.ampx_member.restart()

    def take_checked(self) -> dict[int, bool]:
        """Return and forget the finiteness so far, by loss id. Sync: where it was not read yet."""
        checked, self._checked = self._checked, {}
        return {
            loss_id: not bool(found) if isinstance(found, torch.Tensor) else found for loss_id, found in checked.items()
        }

    def heal(self) -> None:
        """Put right what an exception left half done, except the gradients, which are about to be cleared."""
        self.mixer.evaluating = False
        self.gradients.forget_flags()
        if self.masters is not None:
            self.masters.push_weights()
        casting.forget_weights()

    def _reset(self) -> None:
        self._checked = {}
        self.revealed = False
        self._norm = None
        self._clipped = False
        self._guard.open = self._guard.begins = False
        self._drop_kernel_options()
        self.mixer.reset(self)

    # Optimizer._patch_step_function would otherwise wrap `step` a second time for profiling.
    step.hooked = True  # type: ignore[attr-defined]
