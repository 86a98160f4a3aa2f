"""The optimizer that torch sees: it delegates to the raw one and steps it only with true, finite gradients.

A delegating subclass, because schedulers, hooks, deepcopy, pickle and distributed checkpoints all accept it;
patching the raw optimizer's `step` would be lost by copies and shadowed by schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from threading import get_ident
from typing import Any, Final, cast as type_as

import torch

from ampx.errors import LowPrecisionParametersError, ProtocolError
from ampx.protocol import HOST_LEDGER, Member

from . import casting, fused
from .debug import nonfinite_parameters
from .device_scale import TensorLedger
from .gradients import GradientSet, refuse_half
from .guard import StepGuard
from .leftovers import Leftovers, Sight, divide, look
from .losses_by_id import LossMixer
from .prepare import masters
from .step import Stepping

# What `_attach` makes anew, and what a scheduler hangs on an optimizer.
_NOT_COPIED: Final = frozenset(
    (
        "gradients",
        "_casting_off",
        "mixer",
        "_checked",
        "_norm",
        "revealed",
        "leftovers",
        "_entered",
        "_entering",
        "_thread",
        "_clipped",
        "_incomplete",
        "_undo_fused",
        "_guard",
        "_guard_handle",
        "step",
        "_opt_called",
    )
)


class AmpOptimizer(Stepping):
    """A torch optimizer with its own loss scale.

    Everything but `step` and `zero_grad` is the raw optimizer's; `state_dict` holds nothing of ampx and loads
    into plain torch (`amp.state_dict()` holds the loss scale).

    Attributes:
        ampx_member: Its place in the protocol.
    """

    _undo_fused: Callable[[], None] | None

    def __init__(self, optimizer: torch.optim.Optimizer, member: Member, options: Mapping[str, Any]) -> None:
        """Made by `ampx.wrap_optimizer`."""
        self.optimizer = optimizer
        self.ampx_member = member
        self.masters = masters.of(optimizer)
        self._max_norm = options["max_grad_norm"]
        self._max_value = options["max_grad_value"]
        self._process_group = options.get("process_group")
        plan = options["plan"]
        self.device_type = None if plan is None else plan.device
        # Checked at the first scale_loss, because prepare may come after wrap_optimizer.
        self._must_be_prepared = plan is not None and options["level"].casts_params
        self._accepts_half = not member.group.enabled or options["level"].name == "O3"
        self._fused = options.get("fused") is not None and member.group.enabled
        self._attach()
        if self._fused:
            self._undo_fused = fused.use(optimizer)

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        # Native defect: an optimizer that multiplies matrices would have its own operations cast.
        self._casting_off = nullcontext() if self.device_type is None else casting.off(self.device_type)
        self.gradients = GradientSet(self.optimizer, self._accepts_half)
        self.mixer = LossMixer()
        self._checked = {}
        self._norm = None
        self.revealed = False
        self.leftovers = Leftovers()
        self._entered = 0  # so many bodies
        self._entering = 1.0
        self._thread: int | None = None  # of the last one
        self._clipped = False
        self._incomplete = isinstance(self.optimizer, torch.optim.SGD)
        self._undo_fused = None
        self._guard = StepGuard(self.ampx_member)
        self._guard_handle = self.optimizer.register_step_pre_hook(self._guard)
        self.ampx_member.belong_to(self)
        self.ampx_member.mixes = False

    # -- what core asks ------------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Make the pending gradients true; the step tests them again, since they may change until then."""
        if not self.ampx_member.group.enabled:
            return
        if self.ampx_member.stage != "unscaled":
            self.ampx_member.check_step()
            self.check_and_unscale(reads=False)
        self.revealed = True

    def ampx_clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Unscale if not done, clip, and give the norm before clipping as a float32 scalar tensor."""
        self.ampx_unscale()
        return type_as("torch.Tensor", self._clip(max_norm, None)).float()

    def ampx_unwrap(self) -> None:
        """Leave the raw optimizer as it was."""
        self._guard_handle.remove()
        if self._undo_fused is not None:
            self._undo_fused()

    def ampx_notice_cleared(self) -> None:
        """Forget true gradients that model.zero_grad() dropped: a step skipped by hand."""
        if not self.gradients.collect():
            self.forget()

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Put gradients of other losses aside, and have those that are left from before carry the scale.

        Raises:
            ProtocolError: A skipped step left them, or nobody can tell what they carry.
        """
        if self._must_be_prepared:
            self._check_prepared()
        if self.masters is not None:
            self.masters.begin()
        self._entered += 1
        self._thread = get_ident()
        self._entering = scale
        if self.mixer.evaluating:
            self.mixer.before(self, loss_id)
        elif self.ampx_member.factors:
            if self.leftovers.notes:
                self.bring_together()
            self.mixer.before(self, loss_id)
        elif self._keeps_gradients(scale):
            self._take_up(scale)  # the first loss since the last step

    def _keeps_gradients(self, scale: Any) -> bool:
        """Return whether gradients are left that might carry another scale; here a step costs time that has none."""
        if not self.leftovers.notes and type(scale) is float and scale == 1.0:
            return False
        if self.masters is not None:
            return True
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return True
        return False

    def _take_up(self, scale: Any) -> None:
        """Have gradients that were not cleared carry the scale of those that are about to be added."""
        plan = self.leftovers.plan(self.leaves(), scale, 1.0)
        if plan:
            self.ampx_member.begin_change()  # until the body is entered
            divide(plan)
        self.leftovers.notes = {}

    def bring_together(self) -> None:
        """Have gradients to which losses of other optimizers were added carry what the others of this one carry.

        Raises:
            ProtocolError: Nobody can tell what they carry, or they are true already and were tested before.
        """
        member = self.ampx_member
        scale = member.factor if member.stage == "scaled" else 1.0
        plan = self.leftovers.plan(self.leaves(), scale, scale)
        if plan:
            member.begin_change()
            divide(plan)
            member.end_change()
        self.leftovers.notes = {}

    def leaves(self) -> list[torch.nn.Parameter]:
        """List the parameters whose gradients backward makes."""
        parameters = self.gradients.parameters()
        if self.masters is None:
            return parameters
        masters = {id(master) for _, master in self.masters.pairs}
        return [*(one for one in parameters if id(one) not in masters), *self.masters.model_parameters()]

    def ampx_watch(self, scale: Any) -> tuple[int, list[Sight]] | None:
        """Look at the gradients before the body of other optimizers."""
        member = self.ampx_member
        config = member.group.config
        unscaled = scale == 1.0 if type(scale) is float else False
        if not member.group.enabled or (unscaled and not config.dynamic and config.init_scale == 1.0):
            return None
        # What a body of this one does, or another thread, is no other optimizer's doing.
        if member.stage in ("inside", "interrupted") or self._thread not in (None, get_ident()):
            return None
        return self._entered, look(self.leaves())

    def ampx_notice_foreign(self, before: tuple[int, list[Sight]], scale: Any) -> None:
        """Note the gradients to which a body of other optimizers has written."""
        entered, sights = before
        if entered != self._entered or self._thread not in (None, get_ident()):
            return
        member = self.ampx_member
        default = {"idle": 1.0, "scaled": member.factor}.get(member.stage)
        self.leftovers.note_foreign(sights, default, scale)

    def _check_prepared(self) -> None:
        """Raise where the level asks for low-precision parameters and `prepare` never made any.

        Raises:
            ProtocolError: So it is; the model would train in float32.
        """
        low = (torch.float16, torch.bfloat16)
        if self.masters is None and not any(one.dtype in low for one in self.gradients.parameters()):
            raise ProtocolError(
                "the level asks for low-precision parameters, but the optimizer holds none: the model would train in "
                "float32. Call model, opt = ampx.prepare(model, opt) first, or use level='O1'."
            )
        self._must_be_prepared = False

    def ampx_after_backward(self, loss_id: int) -> None:
        """Bring them back."""
        if self.mixer.loss_id is not None:
            self.mixer.after(self)

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Bring them back after an exception; what the backward left carries its scale."""
        self.mixer.abandon(self)
        if not self.ampx_member.factors:
            self.leftovers.note(self.leaves(), self._entering)

    def ampx_culprits(self) -> tuple[str, ...]:
        """Name the parameters whose gradients are not finite. Sync: one."""
        return tuple(name for name, _, _ in nonfinite_parameters(self, None))

    # -- what torch asks -----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, pending ones included."""
        member = self.ampx_member
        if member.stage == "interrupted":
            self.heal()
        elif member.stage in ("scaled", "unscaled") or (self.masters is not None and not member.pending):
            member.begin_change()
        self.optimizer.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        self.leftovers.notes = {}
        if member.stage != "idle":
            self.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the raw optimizer's state; the loss scale stays."""
        self.optimizer.load_state_dict(state_dict)
        self._incomplete = isinstance(self.optimizer, torch.optim.SGD)
        if self._fused and not all(group["fused"] for group in self.param_groups):
            fused.use(self.optimizer)  # the checkpoint was written by an optimizer that was not
        if self.on_device and not all(group.get("fused") for group in self.param_groups):
            # torch takes over `fused` with the other options: only fused kernels know how to skip by themselves.
            self.ampx_member.group.resolve()
            self._checked = self.take_checked()  # type: ignore[assignment]
            self.ampx_member.group.ledger = HOST_LEDGER

    def __repr__(self) -> str:
        """Show the raw optimizer and the loss scale's configuration."""
        return f"AmpOptimizer({self.optimizer!r}, {self.ampx_member.group.config!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the raw optimizer.

        Raises:
            LowPrecisionParametersError: It holds float16 parameters.
        """
        self.optimizer.add_param_group(param_group)
        self._incomplete = isinstance(self.optimizer, torch.optim.SGD)
        try:
            if not self._accepts_half:
                refuse_half(self.param_groups[-1:])
        except LowPrecisionParametersError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what `_attach` makes, and a scheduler's patch of `step`."""
        kept = {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED}
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
            self.leftovers.note(self.leaves(), None)
