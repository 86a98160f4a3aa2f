"""The optimizer that `initialize` hands back: the script's own object, with unscaled gradients after every block.

apex unscaled gradients when a `scale_loss` block ended, and added them to those of earlier blocks. So does this:
what hangs on the parameters between two blocks is unscaled, whatever scales the blocks had, and can be clipped, read or
added to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ampx.errors import UnsupportedByBackendError
from ampx.events import StepResult
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member, ScaleGroup
from ampx_torch import casting
from ampx_torch.closures import evaluates_once
from ampx_torch.debug import nonfinite_parameters
from ampx_torch.delegation import TakenOver, give_back, take_over
from ampx_torch.gradients import GradientSet, clip
from ampx_torch.losses_by_id import Aside, add_back, drop_gradients, put_aside
from ampx_torch.prepare import masters
from ampx_torch.prepare.masters import MasterWeights, give

from ._amp_state import _amp_state
from .models import guard_checkpoints, make_masters
from .scaler import Due, LossScaler, Verdict, send, settle, tell_skipped
from .stash import Stash


# The delegating base comes first: Python changes an object's class only between classes of the same layout.
class ApexOptimizer(TakenOver, WrappedOptimizer):
    """A script's optimizer after `initialize`.

    It does not stand on torch's own step, which unscales, checks and moves the scale in one go: `apex.amp` decides
    about every block when the block ends, so what is left for the step are unscaled gradients and what was decided.

    Attributes:
        ampx_member: Its place in the protocol.
        masters: Float32 copies of low-precision parameters, or None.
        gradients: The gradients behind the parameter groups.
        delays: The block that runs was asked to leave the gradients scaled.
        verdict: What the block that runs finds.
        pending: What blocks found that nothing was decided about yet, by loss id.
    """

    own: ClassVar[frozenset[str]] = frozenset(
        (
            *("ampx_member", "masters", "gradients", "delays", "verdict", "pending"),
            *("_aside", "_overflowed", "_scales", "_device", "_amp_stash"),
        )
    )
    masters: MasterWeights | None
    gradients: GradientSet
    delays: bool
    verdict: Verdict
    pending: dict[int, list[Verdict]]
    _aside: Aside
    _overflowed: dict[int, float]
    _scales: dict[int, float]  # of the blocks since the last step
    _amp_stash: Stash

    def begin(self, member: Member, device: str | None) -> None:
        """Start with nothing pending; called once, by `wrap`."""
        self.ampx_member = member
        member.belong_to(self)
        member.mixes = True
        self.masters = masters.of(self.optimizer)
        self.gradients = GradientSet(self.optimizer, accepts_half=True)
        self.delays, self.verdict = False, Verdict()
        self._device = device or "cpu"
        self._amp_stash = Stash(self)
        self._clear()

    def join(self, group: ScaleGroup) -> None:
        """Share the loss scales of another group from now on."""
        member = self.ampx_member
        if member.group is not group:
            if member in member.group.members:
                member.group.members.remove(member)
            member.group = group
            group.members.append(member)

    def _clear(self) -> None:
        self.pending = {}
        self._aside = []
        self._overflowed = {}
        self._scales = {}

    # -- one block ---------------------------------------------------------------------------------

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Put unscaled gradients aside, so that scaled ones are not added to them; the stage is "changing" then."""
        member = self.ampx_member
        self._amp_lazy_init()
        self.verdict = Verdict()
        if loss_id in member.factors:  # gradients of `delay_unscale` carry the same scale: they add up as they are
            return
        self._unscale()
        member.begin_change()
        if not self._put_aside():  # somebody cleared the gradients: what overflowed moves the scale and skips nothing
            events = self._settle()
            self._overflowed, self._scales = {}, {}
            send(events)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Unscale the new gradients, unless the block was asked not to."""
        self._amp_stash.params_have_scaled_gradients = self.delays
        if not self.delays:
            self._unscale()

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Drop what an unfinished backward left, and bring back what was put aside."""
        if not self.ampx_member.factors:
            drop_gradients(self)
            self._bring_back()

    def _put_aside(self) -> bool:
        """Put the gradients aside; return whether there were any."""
        if self.masters is not None:
            _pull_foreign(self.masters)
        put_aside(self, self._aside)
        return bool(self._aside)

    def _bring_back(self) -> None:
        aside, self._aside = self._aside, []
        add_back(aside)

    def note(self, loss_id: int, finite: bool) -> None:
        """Remember that a block was decided about, and if it overflowed that the next step is skipped."""
        if not finite:
            self._overflowed[loss_id] = self._scales[loss_id]
        self.pending.pop(loss_id, None)

    def finite(self) -> bool:
        """Return whether no block overflowed since the last step, as far as is known."""
        return not self._overflowed and all(
            verdict.finite for verdicts in self.pending.values() for verdict in verdicts
        )

    def _settle(self) -> list[Due]:
        return [event for loss_id in list(self.pending) for event in settle(self, loss_id)]

    # -- what core asks ----------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Unscale pending gradients; after a block without `delay_unscale` they are. Sync: one a device."""
        if self.ampx_member.stage != "unscaled":
            self.ampx_member.check_step()
        self._unscale()

    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Clip the unscaled gradients and return their norm before, a float32 scalar tensor."""
        self.ampx_unscale()
        finite = self.finite()
        self.ampx_member.begin_change()
        norm = clip(self.gradients.parameters(), max_norm, None, None if finite else True)
        self.ampx_member.end_change()
        return norm

    def ampx_unwrap(self) -> None:
        """Leave the object as it was."""
        give_back(self)

    def ampx_culprits(self) -> tuple[str, ...]:
        """Name the parameters whose gradients are not finite. Sync: one."""
        return tuple(name for name, _, _ in nonfinite_parameters(self, None))

    # -- what scripts ask --------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients, or skip where a block since the last step overflowed; return what the closure returned.

        A closure is evaluated once, before the update; it runs backward in a `scale_loss` block.

        Raises:
            UnsupportedByBackendError: The optimizer evaluates closures several times.
            ProtocolError: A block runs, or a call before was interrupted by an exception: `zero_grad` starts over.

        Sync: one a device, because the gradients may have changed since the block; none after an overflow.
        """
        loss = None if closure is None else self._evaluate(closure)
        self._collect()
        self._unscale()
        events = self._check()
        overflowed = self._overflowed
        # Schedulers ask it, and would warn that they saw no step: skipping is no mistake.
        self.optimizer._opt_called = True
        if not overflowed:
            self._apply()
        self._close()
        send(events)
        self._tell_skip(overflowed)
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if not evaluates_once(self.optimizer):
            raise UnsupportedByBackendError(
                f"step got a closure for {type(self.optimizer).__name__}, which evaluates it as often as it likes; "
                f"amp accepts optimizers of torch.optim that evaluate it once. Use ampx.wrap_optimizer, which "
                f"takes any."
            )
        with torch.enable_grad():
            return closure()

    def _collect(self) -> None:
        """Add to the masters' gradients what a backward outside any block left on the model."""
        member = self.ampx_member
        if member.pending:
            member.check_step()
        self._amp_lazy_init()
        if self.masters is not None and member.stage == "idle":
            member.begin_change()
            _pull_foreign(self.masters)
            member.end_change()

    def _unscale(self) -> None:
        """Divide pending gradients by the scale they carry, note their finiteness, add what was put aside."""
        member = self.ampx_member
        if not member.factors:
            return
        ((loss_id, factor),) = member.factors.items()  # gradients of another loss are unscaled before its block
        member.begin_change("unscaled")
        if self.masters is not None:
            self.masters.pull_gradients()
            _mark_pulled(self.masters)
        flags = self.gradients.unscale(self.gradients.collect(), factor, fresh=True)
        self.verdict.finite &= self.gradients.finite(flags)
        self._scales[loss_id] = float(factor)
        self.pending.setdefault(loss_id, []).append(self.verdict)
        self._bring_back()
        self._amp_stash.params_have_scaled_gradients = False
        member.drop_factors()
        member.end_change()

    def _check(self) -> list[Due]:
        """Decide about the blocks whose overflow check was delayed, and test the gradients as they will be applied.

        Since their blocks they may have been averaged over processes, added up to infinity or divided by zero, and
        gradients of a backward outside any block were never tested.
        """
        if self.finite() and not self.gradients.finite(
            self.gradients.unscale(self.gradients.collect(), 1.0, fresh=True)
        ):
            if not self._scales:
                self._overflowed[0] = 1.0
            for loss_id in self._scales:
                self.pending[loss_id] = [Verdict(finite=False)]
        self.ampx_member.begin_change()
        return self._settle()

    def _apply(self) -> None:
        with casting.off(self._device):
            self.optimizer.step()
        if self.masters is not None:
            self.masters.push_weights()
        casting.forget_weights()

    def _close(self) -> None:
        """Note the outcome; masters' gradients go, because `model.zero_grad()` does not reach them."""
        member, finite = self.ampx_member, not self._overflowed
        loss_id = next(iter(self._overflowed), 0)
        member.group.steps += 1
        state = member.group.state_of(loss_id)
        scale = next(reversed(self._scales.values()), 1.0)
        if self.masters is not None:
            for _, master in self.masters.pairs:
                master.grad = None
        self._clear()
        member.forget(StepResult(finite, finite, scale, float(state.scale), int(state.consecutive_skips)))

    def _tell_skip(self, overflowed: dict[int, float]) -> None:
        group = self.ampx_member.group
        for loss_id, scale in overflowed.items():
            now = float(group.state_of(loss_id).scale)
            _amp_state.tell(f"amp: gradients overflowed, the step is skipped; loss scale {loss_id} is {now:g} now")
            tell_skipped(group, loss_id, scale)

    # A scheduler made later need not patch `step` to count, and torch need not wrap it for profiling.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget all gradients, pending ones and those put aside included, and what an exception left half done."""
        member = self.ampx_member
        if self.masters is not None and member.stage in ("changing", "interrupted"):
            self.masters.push_weights()  # the masters may have been updated
            casting.forget_weights()
        if not (member.pending and member.stage in ("idle", "inside")):  # inside a block it ends as it began
            member.begin_change()
        self.optimizer.zero_grad(*args, **kwargs)
        if self.masters is not None:
            for own, master in self.masters.pairs:
                own.grad = master.grad = None
        self._clear()
        self._amp_stash.params_have_scaled_gradients = False
        member.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; with master weights its low-precision parameters get masters."""
        self.optimizer.add_param_group(param_group)
        if self.masters is not None:
            copies = make_masters([self.optimizer], (), None, keep=False)
            before = self.masters
            (self.masters,) = give([self.optimizer], copies)
            self.masters.extend(before)
            guard_checkpoints(_amp_state.models, copies, all_of=False)
        if self._amp_stash.lazy_init_called:
            self._amp_stash.fill(self)

    # -- the private names of apex that trainers call ----------------------------------------------

    def _amp_lazy_init(self) -> None:
        if self.masters is not None:
            self.masters.begin()
        if not self._amp_stash.lazy_init_called:
            self._lazy_init_maybe_master_weights()
            self._amp_stash.lazy_init_called = True

    def _lazy_init_maybe_master_weights(self) -> None:
        if self.masters is not None:
            self.masters.begin()
        self._amp_stash.fill(self)

    def _prepare_amp_backward(self) -> None:
        self.ampx_before_backward(0, None)
        self.ampx_member.end_change()

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        """Unscale gradients that carry the scale of a loss; `scaler.update_scale` or the step moves it."""
        self.ampx_member.note_scaled(scaler.loss_scale(), scaler.loss_id)
        self._unscale()
        if not self.verdict.finite:
            scaler._overflow_buf.fill_(1)

    def _master_params_to_model_params(self) -> None:
        if self.masters is not None:
            self.masters.push_weights()
            casting.forget_weights()

    def __repr__(self) -> str:
        return repr(self.optimizer)


def wrap(optimizer: Any, member: Member, options: Mapping[str, Any]) -> ApexOptimizer:
    """Turn a script's optimizer into an `ApexOptimizer`, in place."""
    return make(optimizer, ApexOptimizer, member, options)


def make(optimizer: Any, kind: type[ApexOptimizer], member: Member, options: Mapping[str, Any]) -> ApexOptimizer:
    """Turn an optimizer into one of a kind, in place."""
    take_over(optimizer, kind)
    optimizer.begin(member, None if options["plan"] is None else options["plan"].device)
    return optimizer


# -- which gradients of a low-precision model its masters have already ------------------------------

# As in apex the model's own gradients stay, scaled, after a block. The next block must not count them again, nor must a
# step without a block take them for unscaled ones, as it takes those of a backward outside any block.
_MARK = "_ampx_pulled"


def _mark_pulled(masters: MasterWeights) -> None:
    """Remember that the masters have all gradients that are on the model now."""
    for own in masters.model_parameters():
        if own.grad is not None:
            setattr(own.grad, _MARK, True)


def _pull_foreign(masters: MasterWeights) -> None:
    """Add to the masters' gradients what a backward outside any block left on the model: that is unscaled."""
    for own, master in masters.pairs:
        if own.grad is not None and not hasattr(own.grad, _MARK):
            foreign = own.grad.to(torch.float32, copy=True)
            master.grad = foreign if master.grad is None else master.grad + foreign
    _mark_pulled(masters)
