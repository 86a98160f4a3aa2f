"""A wrapped optimizer and its step: collect, unscale, check, clip, apply or skip, close.

A delegating subclass of torch's optimizer, because schedulers, hooks, deepcopy, pickle and distributed checkpoints all
accept it; patching the raw optimizer's `step` would be lost by copies and shadowed by schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from ampx.errors import LowPrecisionParametersError, ProtocolError, RawStepError
from ampx.events import UNCHECKED
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import HOST_LEDGER, HostLedger, Member, NotCopied
from ampx.provenance import UNKNOWN, GradientSnapshot, Provenance
from ampx.saved_state import refuse_session_state
from ampx.scale_state import is_one

from . import casting, folded_step, fused, raw_steps
from .closures import evaluates_once, step_with_closure
from .debug import nonfinite_parameters
from .delegation import DelegatingOptimizer
from .device_scale import TensorLedger
from .folded_step import Folded
from .gradients import GradientSet, all_on_cpu, clip, refuse_half
from .losses_by_id import LossMixer
from .meter import UpdateMeter
from .prepare import masters
from .slots import ParameterSlots
from .trees import LOW

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

_NOTHING: Final = nullcontext()
_SLOTS: Final = ParameterSlots()
# What a scheduler hangs on an optimizer, for itself.
_OF_SCHEDULERS: Final = frozenset(("step", "_opt_called"))


class PendingGradients(NotCopied):
    """What is known of the gradients that wait for a step, beyond their stage.

    Attributes:
        checked: Finiteness by loss id of gradients that are unscaled already: bools, or flags on a device that nobody
            has read.
        revealed: The unscaled gradients may have changed since they were tested: the step tests them again.
        norm: Their norm before clipping; None where nobody measured it.
        clipped: They are clipped as `wrap_optimizer` was asked to.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget gradients that were used or cleared."""
        self.checked: dict[int, Any] = {}
        self.revealed = self.clipped = False
        self.norm: Any = None

    def note_norm(self, norm: Any) -> None:
        """Keep the first norm that was measured: later ones are of clipped gradients."""
        if self.norm is None:
            self.norm = norm


class Bodies(NotCopied):
    """The `scale_loss` bodies of one optimizer.

    Attributes:
        count: How many began.
        scale: The loss scale of the last one.
        thread: Where it ran; None before the first.
    """

    def __init__(self) -> None:
        self.count, self.scale = 0, cast("Any", 1.0)
        self.thread: int | None = None


class RawStep(NotCopied):
    """The raw optimizer's own step, and what keeps others from running it while gradients are scaled.

    Attributes:
        guard: The hook that raises.
        handle: Takes it off.
        incomplete: Of a fused SGD some parameters may have no momentum yet.
        undo_fused: Undoes `fused.use`; None where that was not called.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, member: Member) -> None:
        self.guard = StepGuard(member)
        self.handle = optimizer.register_step_pre_hook(self.guard)
        self.incomplete = isinstance(optimizer, torch.optim.SGD)
        self.undo_fused: Callable[[], None] | None = None


class AmpOptimizer(WrappedOptimizer, DelegatingOptimizer):
    """A torch optimizer with its own loss scale.

    Everything but `step` and `zero_grad` is the raw optimizer's; `state_dict` holds nothing of ampx and loads
    into plain torch (`amp.state_dict()` holds the loss scale).

    Attributes:
        masters: Float32 copies of low-precision parameters (O2), or None.
        device_type: Where casting is switched off for the raw optimizer; None where nothing is cast.
        process_group: The processes that agree on finiteness, or None.
        gradients: The gradients behind the parameter groups.
        mixer: Keeps losses with scales of their own apart.
        provenance: Gradients that carry another scale than the stage says.
        pending: What is known of the gradients that wait for a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, member: Member, options: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self.ampx_member = member
        self.masters: masters.MasterWeights | None = masters.of(optimizer)
        self.process_group = options.get("process_group")
        plan = options["plan"]
        self.device_type = None if plan is None else plan.device
        self._compute = "float32" if plan is None else plan.dtype
        self._max_norm: float | None = options["max_grad_norm"]
        self._max_value: float | None = options["max_grad_value"]
        # Checked at the first scale_loss, because prepare may come after wrap_optimizer.
        self._must_be_prepared = plan is not None and options["level"].casts_params
        self._accepts_half = not member.group.enabled or options["level"].name == "O3"
        self._fused = options.get("fused") is not None and member.group.enabled
        self._attach()
        if self._fused:
            self._raw.undo_fused = fused.use(optimizer)

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        self.gradients = GradientSet(self.optimizer, self._accepts_half)
        self.mixer = LossMixer()
        self.provenance = Provenance(_SLOTS)
        self._meter = UpdateMeter(self._compute)
        self.ampx_member.observers = (self._meter,)
        self.pending = PendingGradients()
        self._bodies = Bodies()
        self._clips = self._max_norm is not None or self._max_value is not None
        self._groups = len(self.optimizer.param_groups)
        refusal = vars(self.optimizer).pop("ampx_refusal", None)  # of prepare, until there is a wrapper
        if refusal is not None:
            refusal.remove()
        self._raw = RawStep(self.optimizer, self.ampx_member)
        self.ampx_member.belong_to(self)
        self.ampx_member.mixes = False
        raw_steps.living.add(self)
        raw_steps.note_wrapped(self.optimizer)

    @property
    def on_device(self) -> bool:
        """Whether the loss scale lives on the device."""
        # By type: asking an abstract class takes longer, and every step asks several times.
        return type(self.ampx_member.group.ledger) is not HostLedger

    @property
    def _scales(self) -> bool:
        """Whether a loss scale may be other than 1."""
        return self.ampx_enabled and not is_one(self.ampx_member.group.config)

    # -- the step ------------------------------------------------------------------------------------

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
        member, loss = self.ampx_member, None
        if not member.group.enabled:
            return self._step_disabled(closure)
        if closure is not None:
            if not evaluates_once(self.optimizer):
                return step_with_closure(self, closure)
            with torch.enable_grad():
                loss = closure()
        gradients = self.collect_pending()
        if not gradients and (self.process_group is None or member.stage == "idle"):
            self._close_empty()
            return loss
        if member.observers:
            member.begin_step(self)
        folded = self._fold(gradients) if self._max_norm is not None or self.gradients.reads_fast else None
        if folded is None:
            if member.stage == "scaled":
                self.unscale(gradients)
            elif self.pending.revealed:
                if self.masters is not None:
                    self.masters.check_writes()
                self.look_again(gradients)
        overflow = self.check()
        if overflow is True:
            self.skip()
        else:
            if folded is None and self._clips:
                self.clip()
            self.apply(overflow, folded)
        self.close(self.pending.checked)
        return loss

    # Optimizer._patch_step_function would otherwise wrap `step` a second time for profiling.
    step.hooked = True  # type: ignore[attr-defined]

    def collect(self) -> list[list[torch.Tensor]]:
        """List the gradients that exist, pulled from a low-precision model where there is one."""
        if self.masters is not None and self.ampx_member.stage in ("inside", "scaled", "changing", "interrupted"):
            self.masters.pull_gradients()
        return self.gradients.collect()

    def collect_pending(self) -> list[list[torch.Tensor]]:
        """List the gradients that a counted step can use; raise where they were never scaled."""
        member = self.ampx_member
        if member.stage in ("inside", "changing", "interrupted"):
            member.check_step()
        if member.stage == "idle":
            # Distributed checkpoints step on gradients of zeros to make the optimizer create its state.
            if any(gradient.any() for bucket in self.collect() for gradient in bucket):
                member.check_step()
            if self.masters is not None and self.masters.any_gradient():
                member.check_step()
            return []
        self.notice_groups()
        if self.provenance.notes:
            self.bring_together()
        gradients = self.collect()
        if member.backwards and gradients:
            member.check_backward()
        if self._raw.incomplete and gradients:
            fused.check_momentum(self.optimizer)
        return gradients

    def unscale(self, gradients: list[list[torch.Tensor]], reads: bool = True) -> None:
        """Divide gradients by the scale they carry and note their finiteness; the stage is "changing" after it.

        Without `reads`, finiteness is left to the step where reading it would wait for a device.
        """
        member, on_device, mixer = self.ampx_member, self.on_device, self.mixer
        unread = on_device or not (reads or all_on_cpu([gradient for bucket in gradients for gradient in bucket]))
        loss_id = next(iter(member.factors)) if mixer.loss_id is None else mixer.loss_id
        factor = member.factors[loss_id]
        member.begin_change()
        try:
            grows = on_device and self._may_grow(factor, loss_id)
            flags = self.gradients.unscale(gradients, factor, unread or bool(mixer.aside), grows)
        except LowPrecisionParametersError:  # a refusal comes before anything is divided
            member.end_change()
            raise
        if mixer.aside:
            finite = mixer.check_sum(self, flags)
        else:
            if self.process_group is not None:
                flags = [self.agree(self.gradients.combine(flags))]
            finite = self.gradients.combine(flags) if unread else self.gradients.finite(flags)
        if loss_id in self.pending.checked:
            earlier = self.pending.checked[loss_id]
            finite = torch.maximum(earlier, finite) if on_device else earlier and finite
        self.pending.checked[loss_id] = finite
        for other, shared in self._sharers():
            other.provenance.note_unscaled(shared)

    def _sharers(self) -> list[tuple[AmpOptimizer, list[torch.nn.Parameter]]]:
        """List other optimizers that take gradients of this one for scaled, and the parameters in question."""
        sharers: list[tuple[AmpOptimizer, list[torch.nn.Parameter]]] = []
        if len(raw_steps.living) < 2:
            return sharers
        for other in list(raw_steps.living):
            if other is not self and (other.ampx_member.stage == "scaled" or other.provenance.notes):
                shared = self.gradients.identities() & other.gradients.identities()
                if shared:
                    sharers.append((other, [own for own in self.gradients.parameters() if id(own) in shared]))
        return sharers

    def check(self) -> bool | torch.Tensor:
        """Return whether a gradient overflowed; with the scale on the device a flag, which the fused kernel obeys."""
        if not self.on_device:
            return not all(self.pending.checked.values())
        overflow = self.gradients.combine(list(self.pending.checked.values()))
        return True if fused.makes_momentum(self.optimizer) and bool(overflow) else overflow

    def look_again(self, gradients: list[list[torch.Tensor]]) -> None:
        """Test unscaled gradients again: they may have been written to since. The stage is "changing" after it.

        What is not finite counts for the first loss; for none, where one had overflowed before.
        """
        self.ampx_member.begin_change()
        unread = self._unread()
        if len(unread) < len(self.pending.checked) and not all(self.pending.checked.values()):
            return  # the step is skipped, whatever they are
        loss_id = next(iter(self.pending.checked), 0)
        flag = self.gradients.combine(self.gradients.unscale(gradients, 1.0, fresh=True))
        if self.process_group is not None:
            flag = self.agree(flag)
        if not self.on_device:
            self.pending.checked[loss_id] = not self.gradients.combine([*unread, flag]).item()
        elif unread:
            flag = torch.where(self.gradients.combine(unread) == 0, flag.to(unread[0].device), 0.0)
            self.pending.checked[loss_id] = self.gradients.combine([unread[0], flag])
        else:
            self.pending.checked[loss_id] = flag

    def clip(self) -> None:
        """Clip the unscaled gradients as `wrap_optimizer` was asked to; once, should the step be tried again."""
        if self._clips and not self.pending.clipped:
            self._clip(self._max_norm, self._max_value)
            self.pending.clipped = True

    def apply(self, overflow: bool | torch.Tensor, folded: Folded | None) -> None:
        """Run the raw optimizer; a fused kernel divides gradients, and changes nothing where the flag is set."""
        on_device = isinstance(overflow, torch.Tensor)
        if folded is None and not on_device:
            self.run_raw()
            return
        raw: Any = self.optimizer
        try:
            raw.grad_scale = None if folded is None else folded.divisor
            raw.found_inf = overflow if on_device else None
            self.run_raw()
        finally:
            self._drop_kernel_options()

    def skip(self) -> None:
        """Leave the raw optimizer alone."""
        self.ampx_member.begin_change()
        # A scheduler made on the raw optimizer would warn that it saw no step: skipping is no mistake.
        self.optimizer._opt_called = True

    def close(self, checked: dict[int, Any]) -> None:
        """Note the step's outcome and move the loss scale."""
        member, norm, on_device = self.ampx_member, self.pending.norm, self.on_device
        self.provenance.notes = {}
        if not on_device and False in checked.values():
            self.provenance.note(self.leaves(), UNKNOWN)
        elif self.masters is not None:  # only the masters' gradients became true
            factor = member.factor if self.mixer.loss_id is None else None
            if type(factor) is not float or factor != 1.0:
                self.provenance.note(self.masters.model_parameters(), factor)
        self.pending.forget()
        if self.mixer.loss_id is not None or member.mixes:
            self.mixer.reset(self)
        if on_device:
            ledger = cast("TensorLedger", member.group.ledger)
            checked = {loss_id: ledger.flag(finite) for loss_id, finite in checked.items()}
        member.finish(checked, norm)

    # -- other ways to step --------------------------------------------------------------------------

    def _step_disabled(self, closure: Callable[[], Any] | None) -> Any:
        """Step the raw optimizer, after clipping as `wrap_optimizer` was asked to."""
        optimizer, max_norm, max_value = self.optimizer, self._max_norm, self._max_value

        def clipped() -> Any:
            loss = None if closure is None else closure()
            clip(self.gradients.parameters(), max_norm, max_value)
            return loss

        if closure is not None:
            loss: Any = optimizer.step(clipped if self._clips else closure)
        else:
            if self._clips:
                clipped()
            loss = optimizer.step()
        self.ampx_member.note_result(UNCHECKED)
        return loss

    def _close_empty(self) -> None:
        """Step the raw optimizer, which has nothing to do or only zeros to apply, without counting the step."""
        self.run_raw()
        applied = bool(self.gradients.collect())
        self._reset()
        self.ampx_member.finish_empty(applied)

    def _fold(self, gradients: list[list[torch.Tensor]]) -> Folded | None:
        """Leave unscaling and clipping to the kernel, where no code sees a difference and there is one loss."""
        member, folded = self.ampx_member, None
        if member.stage != "scaled" or self.pending.checked or self.mixer.loss_id is not None:
            return None
        if self._max_value is not None or self.process_group is not None:
            return None
        if raw_steps.other_hooks() or not folded_step.accepts(self.optimizer, gradients) or self._sharers():
            return None
        loss_id, scale = next(iter(member.factors.items()))
        if not self.on_device:
            # One backward with an optimizer whose scale is on a device gives a tensor, whose value is not known.
            # A quotient by less than 1 may overflow, which the kernel would not see.
            if not isinstance(scale, torch.Tensor) and scale >= 1.0:
                folded = folded_step.on_host(gradients, scale, self._max_norm)
        elif (
            self._max_norm is not None
            and not self._may_grow(scale, loss_id)
            and not fused.makes_momentum(self.optimizer)
        ):
            folded = folded_step.on_device(gradients, scale, self._max_norm)
        if folded is not None:
            member.begin_change()  # gradients that the kernel divides must not be used again, should it raise
            self.pending.checked[loss_id] = True if folded.overflow is None else folded.overflow
            self.pending.norm = folded.norm
        return folded

    def run_raw(self, *args: Any) -> Any:
        """Run the raw optimizer's step, perhaps with a closure, casting off; drop weight copies that become stale.

        The stage is "changing" from there on. Where the user has hooks before the step, it is so after them, because
        they may raise without harm.
        """
        raw, guard, member = self.optimizer, self._raw.guard, self.ampx_member
        guard.open = True
        try:
            others = len(raw._optimizer_step_pre_hooks) != 1 or raw_steps.other_hooks()
            # torch wraps every class's step to run hooks, unless the class says that it does so itself
            if others and not args and hasattr(type(raw).step, "__wrapped__"):
                if member.stage == "changing":
                    member.note_unscaled()
                raw._optimizer_step_pre_hooks.move_to_end(self._raw.handle.id)
                guard.begins = True
            elif member.stage != "changing":
                member.begin_change()
            if self._raw.incomplete:
                self._raw.incomplete = not fused.complete_momentum(raw)
            # Native defect: an optimizer that multiplies matrices would have its own operations cast.
            with _NOTHING if self.device_type is None else casting.Off(self.device_type):
                result = raw.step(*args)
        finally:
            guard.open = guard.begins = False
        if self.masters is not None:
            self.masters.push_weights()
        casting.forget_weights()
        return result

    # -- parts of several calls ----------------------------------------------------------------------

    def check_and_unscale(self, reads: bool = True) -> None:
        """Make pending scaled gradients true and note their finiteness; test true ones that may have changed."""
        member = self.ampx_member
        if member.stage == "scaled" or (member.stage == "unscaled" and self.pending.revealed):
            if self.provenance.notes:
                self.bring_together()
            if member.stage == "scaled":
                gradients = self.collect()
                if member.backwards and gradients:
                    member.check_backward()
                self.unscale(gradients, reads)
            else:
                self.look_again(self.collect())
            member.note_unscaled()

    def _unread(self) -> list[torch.Tensor]:
        """List the flags that were not read."""
        return [finite for finite in self.pending.checked.values() if isinstance(finite, torch.Tensor)]

    def take_checked(self) -> dict[int, bool]:
        """Return and forget the finiteness so far, by loss id. Sync: where it was not read yet."""
        checked, self.pending.checked = self.pending.checked, {}
        return {
            loss_id: not bool(finite) if isinstance(finite, torch.Tensor) else finite
            for loss_id, finite in checked.items()
        }

    def agree(self, flag: torch.Tensor) -> torch.Tensor:
        """Make all processes of the group see an overflow that one of them has."""
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.process_group)
        return flag

    def _may_grow(self, scale: Any, loss_id: int) -> bool:
        """Return whether a scale on the device may be below 1."""
        group = self.ampx_member.group
        if scale is not group.ledger.factor(group, loss_id):
            return True  # another optimizer's
        config = group.config
        lowest = config.min_scale if config.dynamic else config.init_scale
        return min([lowest, *(state.scale for state in group.states.values())]) < 1.0

    def _clip(self, max_norm: float | None, max_value: float | None) -> torch.Tensor | None:
        """Clip unscaled gradients; those that are not finite stay, so that they can be told from the others."""
        unread = self._unread()
        overflow: Any = self.gradients.combine(unread) if unread else None
        if not unread and not all(self.pending.checked.values()):
            max_value, overflow = None, True
        member = self.ampx_member
        begins = member.stage != "changing"
        if begins:
            member.begin_change()
        norm = clip(self.gradients.parameters(), max_norm, max_value, overflow)
        self.pending.note_norm(norm)
        if begins:
            member.end_change()
        return norm

    def forget(self) -> None:
        """Drop pending gradients without counting a step."""
        self._reset()
        self._raw.guard.open = self._raw.guard.begins = False
        self._drop_kernel_options()
        self.ampx_member.forget()

    def reset_after_exception(self) -> None:
        """Put right what an exception left half done, except the gradients, which are about to be cleared."""
        self.mixer.evaluating = False
        self.gradients.forget_flags()
        if self.masters is not None:
            self.masters.push_weights()
        casting.forget_weights()

    def _reset(self) -> None:
        self.pending.forget()
        if self.mixer.loss_id is not None or self.ampx_member.mixes:
            self.mixer.reset(self)

    def _drop_kernel_options(self) -> None:
        options = vars(self.optimizer)
        options.pop("grad_scale", None)
        options.pop("found_inf", None)

    # -- what core asks ------------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Unscale the pending gradients; the step tests them again, since they may change until then."""
        if not self.ampx_member.group.enabled:
            return
        if self.ampx_member.stage != "unscaled":
            self.ampx_member.check_step()
            self.check_and_unscale(reads=False)
            if self.masters is not None:
                self.masters.note_true()
        self.pending.revealed = True

    def ampx_clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Unscale if not done, clip, and return the norm before clipping as a float32 scalar tensor."""
        self.ampx_unscale()
        return cast("torch.Tensor", self._clip(max_norm, None)).float()

    def ampx_culprits(self) -> tuple[str, ...]:
        """Return the names of the parameters whose gradients are not finite. Sync: one a device."""
        return tuple(name for name, _, _ in nonfinite_parameters(self, None))

    def ampx_meter(self) -> Meter | None:
        """Return what the last metered update did. Sync: one a device."""
        return self._meter.reading(self)

    def ampx_is_frozen(self) -> bool:
        """Return whether no parameter asks for gradients."""
        return not any(parameter.requires_grad for parameter in self.leaves())

    def ampx_unwrap(self) -> None:
        """Leave the raw optimizer as it was."""
        raw_steps.note_wrapped(self.optimizer, False)
        self._raw.handle.remove()
        if self._raw.undo_fused is not None:
            self._raw.undo_fused()

    def ampx_is_cleared(self) -> bool:
        """Return whether model.zero_grad() dropped unscaled gradients."""
        return not self.gradients.collect()

    def ampx_notice_cleared(self) -> None:
        """Forget them: a step skipped by hand."""
        self.forget()

    def ampx_check_backward(self, loss_id: int) -> None:
        """Raise where gradients of unknown scale are left, or parameters were not prepared.

        Sync: none; one for each gradient of which nobody can tell.
        """
        if self._must_be_prepared:
            self._check_prepared()
        self.notice_groups()
        if self.mixer.evaluating:
            self.mixer.check(self)
        elif self.provenance.notes:
            self.provenance.plan(self.leaves(), 1.0, 1.0)  # whatever the scale: it raises or not
        factors = self.ampx_member.factors
        if factors and loss_id not in factors:
            self._check_not_shared(loss_id)

    def _check_not_shared(self, loss_id: int) -> None:
        """Raise where gradients would be put aside that another optimizer waits for."""
        if any(other.ampx_member.stage == "scaled" for other, _ in self._sharers()):
            raise ProtocolError(
                f"scale_loss(loss_id={loss_id}) after a loss of another id, and the optimizer shares parameters with "
                f"another one that waits for its step; accepted: loss scales by loss_id where every parameter belongs "
                f"to one optimizer, or one loss scale for all losses. Leave loss_id out, or step the other optimizer "
                f"first."
            )

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Put gradients of other losses aside, and have those that are left from before carry the scale."""
        if self._must_be_prepared:
            self._check_prepared()
        self.notice_groups()
        if raw_steps.followed:
            raw_steps.begin_body()
        if self.masters is not None:
            self.masters.begin()
        bodies = self._bodies
        bodies.count += 1
        bodies.scale, bodies.thread = scale, get_ident()
        if self.mixer.evaluating:
            self.mixer.before(self, loss_id)
        elif self.ampx_member.factors:
            if self.provenance.notes:
                self.bring_together()
            self.mixer.before(self, loss_id)
        elif self._keeps_gradients(scale):  # the first loss since the last step
            self._bring_to(scale, 1.0)  # the body ends the change

    def ampx_after_backward(self, loss_id: int) -> None:
        """Add the gradients that were put aside."""
        if raw_steps.followed:
            raw_steps.end_body(self._bodies.scale)
        if self.mixer.loss_id is not None:
            self.mixer.after(self)

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Bring back what was put aside; what the backward left carries its scale."""
        if raw_steps.followed:
            raw_steps.end_body(self._bodies.scale)
        self.mixer.abandon(self)
        if not self.ampx_member.factors:
            self.provenance.note(self.leaves(), self._bodies.scale)

    def ampx_snapshot_gradients(self, scale: Any) -> tuple[int, list[GradientSnapshot]] | None:
        """Look at the gradients before the body of other optimizers."""
        member = self.ampx_member
        if not member.group.enabled or (type(scale) is float and scale == 1.0 and not self._scales):
            return None
        # What a body of this one does, or another thread, is no other optimizer's doing.
        if member.stage in ("inside", "changing", "interrupted") or self._bodies.thread not in (None, get_ident()):
            return None
        return self._bodies.count, _SLOTS.snapshot(self.leaves())

    def ampx_notice_foreign(self, before: tuple[int, list[GradientSnapshot]], scale: Any) -> None:
        """Note the gradients to which a body of other optimizers has written."""
        entered, snapshots = before
        if entered != self._bodies.count or self._bodies.thread not in (None, get_ident()):
            return
        member = self.ampx_member
        default = {"idle": 1.0, "scaled": member.factor}.get(member.stage)
        self.provenance.note_foreign(snapshots, default, scale)

    def _keeps_gradients(self, scale: Any) -> bool:
        """Return whether gradients are left that might carry another scale; here a step costs time that has none."""
        if not self.provenance.notes and type(scale) is float and scale == 1.0:
            return False
        if self.masters is not None:
            return True
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return True
        return False

    def are_unknown(self) -> bool:
        """Return whether a skipped step left gradients that were not cleared. Sync: one a gradient, where it did."""
        left = self.ampx_member.stage == "idle" and bool(self.provenance.notes)
        return left and self.provenance.are_unknown(self.leaves())

    def bring_together(self) -> None:
        """Have gradients to which losses of other optimizers were added carry what the others of this one carry."""
        scale = self.ampx_member.factor if self.ampx_member.stage == "scaled" else 1.0
        self._bring_to(scale, scale)
        self.ampx_member.end_change()

    def _bring_to(self, scale: Any, default: Any) -> None:
        plan = self.provenance.plan(self.leaves(), scale, default)
        if plan:
            self.ampx_member.begin_change()
            self.provenance.divide(plan)
        self.provenance.notes = {}

    def leaves(self) -> list[torch.nn.Parameter]:
        """List the parameters whose gradients backward makes."""
        parameters = self.gradients.parameters()
        if self.masters is None:
            return parameters
        copies = {id(master) for _, master in self.masters.pairs}
        own = [parameter for parameter in parameters if id(parameter) not in copies]
        return [*own, *self.masters.model_parameters()]

    def _check_prepared(self) -> None:
        """Raise where the level asks for low-precision parameters and `prepare` never made any."""
        if self.masters is None and not any(parameter.dtype in LOW for parameter in self.gradients.parameters()):
            raise ProtocolError(
                "the level asks for low-precision parameters, but the optimizer holds none: the model would train in "
                "float32. Call model, opt = ampx.prepare(model, opt) first, or use level='O1'."
            )
        self._must_be_prepared = False

    # -- what torch asks -----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, pending ones included."""
        member = self.ampx_member
        if member.stage in ("changing", "interrupted"):
            self.reset_after_exception()
        elif member.stage in ("scaled", "unscaled") or (self.masters is not None and not member.pending):
            member.begin_change()
        self.optimizer.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        self.provenance.notes = {}
        if member.stage != "idle":
            self.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the raw optimizer's state; the loss scale stays.

        Raises:
            InvalidStateError: It is the state of a session.
        """
        refuse_session_state(state_dict, "load_state_dict")
        self.optimizer.load_state_dict(state_dict)
        self._raw.incomplete = isinstance(self.optimizer, torch.optim.SGD)
        if self._fused and not all(group["fused"] for group in self.param_groups):
            fused.use(self.optimizer)  # the checkpoint was written by an optimizer that was not
        if self.on_device and not all(group.get("fused") for group in self.param_groups):
            # torch takes over `fused` with the other options: only fused kernels know how to skip by themselves.
            self.ampx_member.group.resolve()
            self.pending.checked = {**self.take_checked()}
            self.ampx_member.group.ledger = HOST_LEDGER

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the raw optimizer; one of float16 parameters is refused.

        Gradients that it brings along are taken for scaled where a step has to unscale all; at any other time nobody
        can tell, so that the next step or `scale_loss` asks for `zero_grad`.
        """
        self.optimizer.add_param_group(param_group)
        try:
            if not self._accepts_half:
                refuse_half(self.param_groups[-1:])
        except LowPrecisionParametersError:
            self.param_groups.pop()
            raise
        self.notice_groups()

    def notice_groups(self, true: bool = False) -> None:
        """Note what came with groups that were added since, by the raw optimizer perhaps; `true`: it can be stepped."""
        groups = self.optimizer.param_groups
        if len(groups) == self._groups:
            return
        added, self._groups = groups[self._groups :], len(groups)
        self._raw.incomplete = isinstance(self.optimizer, torch.optim.SGD)
        if not true and self.ampx_member.stage in ("idle", "unscaled") and self._scales:
            self.provenance.note([parameter for group in added for parameter in group["params"]], UNKNOWN)

    def __repr__(self) -> str:
        return f"AmpOptimizer({self.optimizer!r}, {self.ampx_member.group.config!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process, and what a scheduler hung on it."""
        own = {key: value for key, value in self.__dict__.items() if key not in _OF_SCHEDULERS}
        kept = {key: value for key, value in own.items() if not isinstance(value, NotCopied)}
        ledger = self.ampx_member.group.ledger
        return {**kept, "_ledger": type(ledger) if isinstance(ledger, TensorLedger) else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy or a pickle; nothing is pending, whatever gradients came along."""
        make_ledger = state.pop("_ledger")
        self.__dict__.update(state)
        group = self.ampx_member.group
        if make_ledger is not None and not self.on_device:
            group.ledger = make_ledger(self.param_groups[0]["params"][0].device)
        self._attach()
        if self.ampx_member.stage != "idle":
            self.ampx_member.forget()
            self.provenance.note(self.leaves(), UNKNOWN)


class StepGuard:
    """A step hook of the raw optimizer that raises while gradients of `scale_loss` are pending.

    Attributes:
        open: The wrapper itself is stepping.
        begins: It asks to note, when all hooks have run, that the update begins.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self.open = self.begins = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise unless the wrapper steps or nothing is pending."""
        if self.begins:
            self.begins = False
            self._member.begin_change()
        if not self.open and self._member.pending:
            raise RawStepError(
                f"the raw {type(optimizer).__name__} was stepped while gradients of scale_loss are pending; they would "
                f"be applied scaled or unchecked. Call step() on the object that ampx.wrap_optimizer returned."
            )
