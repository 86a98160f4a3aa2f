"""A wrapped optimizer and its step: collect, unscale, check, clip, apply or skip, close.

A delegating subclass of torch's optimizer, because schedulers, hooks, deepcopy, pickle and distributed checkpoints all
accept it; patching the raw optimizer's `step` would be lost by copies and shadowed by schedulers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from ampx.errors import LowPrecisionParametersError, ProtocolError
from ampx.events import UNCHECKED
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import HOST_LEDGER, Member, NotCopied
from ampx.provenance import UNKNOWN, check_not_shared
from ampx.saved_state import refuse_session_state

from . import casting, folded_step, fused, unwrapped_steps
from .closures import evaluates_once, step_with_closure
from .debug import nonfinite_parameters
from .delegation import DelegatingOptimizer
from .device_scale import TensorLedger
from .findings import Findings
from .folded_step import Folded
from .gradients import GradientSet, all_on_cpu, clip, refuse_half
from .losses_by_id import LossMixer
from .meter import UpdateMeter
from .prepare import masters
from .provenance import OptimizerProvenance, living, sharers
from .raw_step import RawStep
from .trees import LOW, gradient_of

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

# What a scheduler hangs on an optimizer, for itself.
_OF_SCHEDULERS: Final = frozenset(("step", "_opt_called"))


class AmpOptimizer(WrappedOptimizer, DelegatingOptimizer):
    """A torch optimizer with its own loss scale.

    Everything but `step` and `zero_grad` is the raw optimizer's; `state_dict` holds nothing of ampx and loads
    into plain torch (`amp.state_dict()` holds the loss scale).

    Attributes:
        masters: Float32 copies of low-precision parameters (O2), or None.
        device_type: Where casting is switched off for the raw optimizer; None where nothing is cast.
        process_group: The processes that agree on finiteness, or None.
        gradients: The gradients behind the parameter groups.
        provenance: Which of them carry another scale than the stage says.
        findings: What was found of those that wait for a step.
        mixer: Keeps losses with scales of their own apart.
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
        self._clips = self._max_norm is not None or self._max_value is not None
        # Checked at the first scale_loss, because prepare may come after wrap_optimizer.
        self._must_be_prepared = plan is not None and options["level"].casts_params
        self._accepts_half = not member.group.enabled or options["level"].name == "O3"
        self._fused = options.get("fused") is not None and member.group.enabled
        self._attach()
        if self._fused:
            self._raw.fuse()

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        member = self.ampx_member
        self.gradients = GradientSet(self.optimizer, self._accepts_half)
        self.provenance = OptimizerProvenance(member)
        self.findings = Findings()
        self.mixer = LossMixer()
        self._raw = RawStep(self.optimizer, member, self.provenance, self.device_type)
        self._meter = UpdateMeter(self._compute)
        self._groups = len(self.optimizer.param_groups)
        member.observers = (self._meter,)
        member.mixes = False
        member.belong_to(self)
        living.add(weakref.ref(self, living.discard))

    @property
    def on_device(self) -> bool:
        """Whether the loss scale lives on the device."""
        return self.ampx_member.group.ledger.on_device

    # -- the step ------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale if not done, check, clip, apply or skip, move the loss scale.

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
        if self._raw.incomplete:
            fused.check_momentum(self.optimizer)
        if member.observers:
            member.begin_step(self)
        folded = self._fold(gradients) if self._max_norm is not None or self.gradients.reads_fast else None
        if folded is None:
            if member.stage == "scaled":
                self.unscale(gradients)
            elif self.findings.revealed:
                self.look_again(gradients)
        finite = self.findings.checked
        overflow = self._check_on_device() if member.group.ledger.on_device else not all(finite.values())
        if overflow is True:
            self.skip()
        else:
            if folded is None and self._clips:
                self.clip()
            self.apply(overflow, folded)
        self.close(finite)
        return loss

    # Optimizer._patch_step_function would otherwise wrap `step` a second time for profiling.
    step.hooked = True  # type: ignore[attr-defined]

    def collect_pending(self) -> list[list[torch.Tensor]]:
        """List the gradients that a counted step can use; raise where they were never scaled."""
        member = self.ampx_member
        if member.stage in ("inside", "changing", "interrupted"):
            member.check_step()
        if member.stage == "idle":
            self._check_nothing_waits()
            return []
        if len(self.optimizer.param_groups) != self._groups:
            self.notice_groups()
        if self.provenance.notes:
            self.provenance.bring_together(self.leaves())
        gradients = self.gradients.collect() if self.masters is None else self.collect()
        if member.backwards and gradients:
            member.check_backward()
        return gradients

    def _check_nothing_waits(self) -> None:
        """Raise where there are gradients that were never scaled."""
        # Distributed checkpoints step on gradients of zeros to make the optimizer create its state.
        waits = any(gradient.any() for bucket in self.collect() for gradient in bucket)
        if waits or (self.masters is not None and self.masters.any_gradient()):
            self.ampx_member.check_step()

    def collect(self) -> list[list[torch.Tensor]]:
        """List the gradients that exist, pulled from a low-precision model where there is one."""
        if self.masters is not None and self.ampx_member.stage in ("inside", "scaled", "changing", "interrupted"):
            self.masters.pull_gradients()
        return self.gradients.collect()

    def unscale(self, gradients: list[list[torch.Tensor]], reads: bool = True) -> None:
        """Divide gradients by the scale they carry and note their finiteness; the stage is "changing" after it.

        Without `reads`, finiteness is left to the step where reading it would wait for a device.
        """
        member, mixer = self.ampx_member, self.mixer
        ledger: Any = member.group.ledger
        on_device = ledger.on_device
        unread = on_device or not (reads or all_on_cpu([gradient for bucket in gradients for gradient in bucket]))
        loss_id = next(iter(member.factors)) if mixer.loss_id is None else mixer.loss_id
        factor = member.factors[loss_id]
        member.begin_change()
        try:
            bounds = ledger.bounds(member.group, loss_id, factor) if on_device else None
            flags = self.gradients.unscale(gradients, factor, unread or bool(mixer.aside), bounds)
        except LowPrecisionParametersError:  # a refusal comes before anything is divided
            member.end_change()
            raise
        if mixer.aside:
            finite = mixer.check_sum(self, flags)
        else:
            if self.process_group is not None:
                flags = [self.agree(self.gradients.combine(flags))]
            finite = self.gradients.combine(flags) if unread else self.gradients.finite(flags)
        if loss_id in self.findings.checked:
            finite = self.findings.joined(loss_id, finite)
        self.findings.checked[loss_id] = finite
        if len(living) > 1 and self.masters is None:  # else only the masters' gradients are unscaled
            for other, shared in sharers(self.provenance, self.leaves()):
                other.provenance.note(shared, 1.0, stays=True)

    def look_again(self, gradients: list[list[torch.Tensor]]) -> None:
        """Test unscaled gradients again: they may have been written to since. The stage is "changing" after it.

        What is not finite counts for the first loss; for none, where one had overflowed before.
        """
        if self.masters is not None:
            self.masters.check_writes()
        self.ampx_member.begin_change()
        checked, unread = self.findings.checked, self.findings.unread()
        if len(unread) < len(checked) and not all(checked.values()):
            return  # the step is skipped, whatever they are
        loss_id = next(iter(checked), 0)
        flag = self.gradients.combine(self.gradients.unscale(gradients, 1.0, fresh=True))
        if self.process_group is not None:
            flag = self.agree(flag)
        if not self.on_device:
            checked[loss_id] = not self.gradients.combine([*unread, flag]).item()
        elif unread:
            flag = torch.where(self.gradients.combine(unread) == 0, flag.to(unread[0].device), 0.0)
            checked[loss_id] = self.gradients.combine([unread[0], flag])
        else:
            checked[loss_id] = flag

    def _check_on_device(self) -> bool | torch.Tensor:
        """Return a flag that the fused kernel obeys; True where it must not run because a gradient overflowed."""
        overflow = self.gradients.combine(list(self.findings.checked.values()))
        return True if fused.makes_momentum(self.optimizer) and bool(overflow) else overflow

    def clip(self) -> None:
        """Clip the unscaled gradients as `wrap_optimizer` was asked to; once, should the step be tried again."""
        if self._clips and not self.findings.clipped:
            self._clip(self._max_norm, self._max_value)
            self.findings.clipped = True

    def apply(self, overflow: bool | torch.Tensor = False, folded: Folded | None = None, *args: Any) -> Any:
        """Run the raw optimizer, perhaps with a closure.

        A fused kernel divides gradients that are folded, and changes nothing where the flag `overflow` is set.
        """
        divisor = None if folded is None else folded.divisor
        result = self._raw.run(divisor, None if overflow is False else overflow, *args)
        if self.masters is not None:
            self.masters.push_weights()
        return result

    def skip(self) -> None:
        """Leave the raw optimizer alone."""
        self.ampx_member.begin_change()
        # A scheduler made on the raw optimizer would warn that it saw no step: skipping is no mistake.
        self.optimizer._opt_called = True

    def close(self, checked: dict[int, Any]) -> None:
        """Note the step's finiteness by loss id, and move the loss scale."""
        member, norm = self.ampx_member, self.findings.norm
        ledger: Any = member.group.ledger
        self.provenance.notes = {}
        if not ledger.on_device and False in checked.values():
            self.provenance.note(self.leaves(), UNKNOWN)
        elif self.masters is not None:  # only the masters' gradients are unscaled
            factor = member.factor if self.mixer.loss_id is None else None
            if type(factor) is not float or factor != 1.0:
                self.provenance.note(self.masters.model_parameters(), factor)
        self.findings.forget()
        if self.mixer.loss_id is not None or member.mixes:
            self.mixer.reset(self)
        if ledger.on_device:
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
        self.apply()
        applied = bool(self.gradients.collect())
        self._reset()
        self.ampx_member.finish_empty(applied)

    def _fold(self, gradients: list[list[torch.Tensor]]) -> Folded | None:
        """Leave unscaling and clipping to the kernel, where no code sees a difference and there is one loss."""
        member, folded = self.ampx_member, None
        ledger: Any = member.group.ledger
        if member.stage != "scaled" or self.findings.checked or self.mixer.loss_id is not None:
            return None
        if self._max_value is not None or self.process_group is not None:
            return None
        if unwrapped_steps.other_hooks() or not folded_step.accepts(self.optimizer, gradients):
            return None
        if len(living) > 1 and sharers(self.provenance, self.leaves()):
            return None
        loss_id, scale = next(iter(member.factors.items()))
        if not ledger.on_device:
            # One backward with an optimizer whose scale is on a device gives a tensor, whose value is not known.
            # A quotient by less than 1 may overflow, which the kernel would not see.
            if not isinstance(scale, torch.Tensor) and scale >= 1.0:
                folded = folded_step.on_host(gradients, scale, self._max_norm)
        elif (
            self._max_norm is not None
            and ledger.bounds(member.group, loss_id, scale)[0] >= 1.0
            and not fused.makes_momentum(self.optimizer)
        ):
            folded = folded_step.on_device(gradients, scale, self._max_norm)
        if folded is not None:
            member.begin_change()  # gradients that the kernel divides must not be used again, should it raise
            self.findings.checked[loss_id] = True if folded.overflow is None else folded.overflow
            self.findings.norm = folded.norm
        return folded

    # -- parts of several calls ----------------------------------------------------------------------

    def check_and_unscale(self, reads: bool = True) -> None:
        """Unscale pending gradients and note their finiteness; test unscaled ones that may have changed."""
        member = self.ampx_member
        if member.stage == "scaled":
            self.unscale(self.collect_pending(), reads)
        elif member.stage == "unscaled" and self.findings.revealed:
            self.look_again(self.collect_pending())
        else:
            return
        member.note_unscaled()

    def agree(self, flag: torch.Tensor) -> torch.Tensor:
        """Make all processes of the group see an overflow that one of them has."""
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.process_group)
        return flag

    def _clip(self, max_norm: float | None, max_value: float | None) -> torch.Tensor | None:
        """Clip unscaled gradients; those that are not finite stay, so that they can be told from the others."""
        unread = self.findings.unread()
        overflow: Any = self.gradients.combine(unread) if unread else None
        if not unread and not all(self.findings.checked.values()):
            max_value, overflow = None, True
        member = self.ampx_member
        begins = member.stage != "changing"
        if begins:
            member.begin_change()
        norm = clip(self.gradients.parameters(), max_norm, max_value, overflow)
        self.findings.note_norm(norm)
        if begins:
            member.end_change()
        return norm

    def forget(self) -> None:
        """Drop pending gradients without counting a step."""
        self._reset()
        self._raw.reset()
        self.ampx_member.forget()

    def reset_after_exception(self) -> None:
        """Put right what an exception left half done, except the gradients, which are about to be cleared."""
        self.mixer.evaluating = False
        self.gradients.forget_flags()
        if self.masters is not None:
            self.masters.push_weights()
        casting.forget_weights()

    def _reset(self) -> None:
        self.findings.forget()
        if self.mixer.loss_id is not None or self.ampx_member.mixes:
            self.mixer.reset(self)

    def are_unknown(self) -> bool:
        """Return whether a skipped step left gradients that were not cleared. Sync: one a gradient, where it did."""
        left = self.ampx_member.stage == "idle" and bool(self.provenance.notes)
        return left and self.provenance.are_unknown(self.leaves())

    def leaves(self) -> list[torch.nn.Parameter]:
        """List the parameters whose gradients backward makes."""
        parameters = self.gradients.parameters()
        if self.masters is None:
            return parameters
        copies = {id(master) for _, master in self.masters.pairs}
        own = [parameter for parameter in parameters if id(parameter) not in copies]
        return [*own, *self.masters.model_parameters()]

    # -- what core asks ------------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Unscale the pending gradients; the step tests them again, since they may change until then."""
        if not self.ampx_member.group.enabled:
            return
        if self.ampx_member.stage != "unscaled":
            self.ampx_member.check_step()
            self.check_and_unscale(reads=False)
            if self.masters is not None:
                self.masters.note_unscaled()
        self.findings.revealed = True

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
        self._raw.unwrap()

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
        if self._must_be_prepared or len(self.optimizer.param_groups) != self._groups:
            self._check_parameters()
        if self.mixer.evaluating:
            self.mixer.check(self)
        elif self.provenance.notes:
            self.provenance.plan(self.leaves(), 1.0, 1.0)  # whatever the scale: it raises or not
        factors = self.ampx_member.factors
        if factors and loss_id not in factors:
            sharing = sharers(self.provenance, self.leaves())
            check_not_shared(loss_id, (other.ampx_member for other, _ in sharing))

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Put gradients of other losses aside, and have those that are left from before carry the scale."""
        if self._must_be_prepared or len(self.optimizer.param_groups) != self._groups:
            self._check_parameters()
        if unwrapped_steps.followed:
            unwrapped_steps.begin_body()
        if self.masters is not None:
            self.masters.begin()
        self.provenance.begin_body(scale)
        if self.mixer.evaluating:
            self.mixer.before(self, loss_id)
        elif self.ampx_member.factors:
            if self.provenance.notes:
                self.provenance.bring_together(self.leaves())
            self.mixer.before(self, loss_id)
        elif self._keeps_gradients(scale):  # the first loss since the last step
            self.provenance.bring_to(self.ampx_member, self.leaves(), scale, 1.0)  # the body ends the change

    def ampx_after_backward(self, loss_id: int) -> None:
        """Add the gradients that were put aside."""
        if unwrapped_steps.followed:
            unwrapped_steps.end_body(self.provenance.scale)
        if self.mixer.loss_id is not None:
            self.mixer.after(self)

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Bring back what was put aside; what the backward left carries its scale."""
        if unwrapped_steps.followed:
            unwrapped_steps.end_body(self.provenance.scale)
        self.mixer.abandon(self)
        if not self.ampx_member.factors:
            self.provenance.note(self.leaves(), self.provenance.scale)

    def ampx_snapshot_gradients(self, scale: Any) -> Any:
        """Look at the gradients before the body of other optimizers."""
        return self.provenance.look(self.leaves()) if self.provenance.concerns(scale) else None

    def ampx_notice_foreign(self, before: Any, scale: Any) -> None:
        """Note the gradients to which a body of other optimizers has written."""
        self.provenance.note_written(before, scale)

    def _keeps_gradients(self, scale: Any) -> bool:
        """Return whether gradients are left that might carry another scale; here a step costs time that has none."""
        if not self.provenance.notes and type(scale) is float and scale == 1.0:
            return False
        if self.masters is not None:
            return True
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if gradient_of(parameter) is not None:
                    return True
        return False

    def _check_parameters(self) -> None:
        """Note new ones; raise where the level asks for low-precision ones and `prepare` never made any."""
        if len(self.optimizer.param_groups) != self._groups:
            self.notice_groups()
        if not self._must_be_prepared:
            return
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
        self._raw.expect_momentum()
        if self._fused and not all(group["fused"] for group in self.param_groups):
            fused.use(self.optimizer)  # the checkpoint was written by an optimizer that was not
        if self.on_device and not all(group.get("fused") for group in self.param_groups):
            # torch takes over `fused` with the other options: only fused kernels know how to skip by themselves.
            self.ampx_member.group.resolve()
            self.findings.checked = {**self.findings.take()}
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

    def notice_groups(self, unscaled: bool = False) -> None:
        """Note what came with groups that were added since, by the raw optimizer perhaps; `unscaled` where it is."""
        groups = self.optimizer.param_groups
        added, self._groups = groups[self._groups :], len(groups)
        self._raw.expect_momentum()
        if not unscaled:
            self.provenance.note_added([parameter for group in added for parameter in group["params"]])

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
