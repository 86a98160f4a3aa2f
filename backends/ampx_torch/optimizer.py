"""The optimizer that torch sees: it delegates to the raw one and steps it only with true, finite gradients.

A delegating subclass, because schedulers, hooks, deepcopy, pickle and distributed checkpoints all accept it;
patching the raw optimizer's `step` would be lost by copies and shadowed by schedulers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final
from typing import cast as type_as

import torch

from ampx import sessions
from ampx.errors import LowPrecisionParametersError, ProtocolError
from ampx.group import Member
from ampx.ledger import HOST_LEDGER

from . import casting, fusing, masters
from .debug import nonfinite_parameters
from .gradients import GradientSet
from .guard import StepGuard
from .ledger import TensorLedger
from .losses_by_id import LossMixer
from .refusals import refuse_half
from .stepping import Stepping

# What `_attach` makes anew, and what a scheduler hangs on an optimizer.
_NOT_COPIED: Final = frozenset(
    (
        "gradients",
        "_casting_off",
        "mixer",
        "_checked",
        "_norm",
        "revealed",
        "_clipped",
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
            self._undo_fused = fusing.use(optimizer)

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        # Native defect: an optimizer that multiplies matrices would have its own operations cast.
        self._casting_off = nullcontext() if self.device_type is None else casting.off(self.device_type)
        self.gradients = GradientSet(self.optimizer, self._accepts_half)
        self.mixer = LossMixer()
        self._checked = {}
        self._norm = None
        self.revealed = False
        self._clipped = False
        self._undo_fused = None
        self._guard = StepGuard(self.ampx_member)
        self._guard_handle = self.optimizer.register_step_pre_hook(self._guard)
        self.ampx_member.belong_to(self)
        self.ampx_member.mixes = False
        group = self.ampx_member.group
        group.emit = sessions.emit
        culprits = weakref.WeakMethod(self._culprits)
        group.culprits = lambda: found() if (found := culprits()) is not None else ()

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
        return type_as("torch.Tensor", self._clip(max_norm, None))

    def ampx_unwrap(self) -> None:
        """Leave the raw optimizer as it was."""
        self._guard_handle.remove()
        if self._undo_fused is not None:
            self._undo_fused()

    def ampx_notice_cleared(self) -> None:
        """Forget true gradients that model.zero_grad() dropped: a step skipped by hand. Sync: none."""
        if not self.gradients.collect():
            self.forget()

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Put gradients of other losses aside."""
        if self._must_be_prepared:
            self._check_prepared()
        if self.masters is not None:
            self.masters.begin()
        if self.ampx_member.factors or self.mixer.evaluating:  # else it is the first loss since the last step
            self.mixer.before(self, loss_id)

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
        """Bring them back after an exception."""
        self.mixer.abandon(self)

    def _culprits(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in nonfinite_parameters(self, None))

    # -- what torch asks -----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, pending ones included."""
        member = self.ampx_member
        if member.stage == "interrupted":
            self.heal()
        elif member.stage in ("scaled", "unscaled"):
            member.begin_change()
        self.optimizer.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        if member.stage != "idle":
            self.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the raw optimizer's state; the loss scale stays."""
        self.optimizer.load_state_dict(state_dict)
        if self._fused and not all(group["fused"] for group in self.param_groups):
            fusing.use(self.optimizer)  # the checkpoint was written by an optimizer that was not
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
        """Come back from a copy or a pickle; gradients did not travel, so nothing is pending."""
        make_ledger = state.pop("_ledger")
        self.__dict__.update(state)
        group = self.ampx_member.group
        if make_ledger is not None and not self.on_device:
            group.ledger = make_ledger(self.param_groups[0]["params"][0].device)
        self._attach()
        if self.ampx_member.stage != "idle":
            self.ampx_member.forget()
