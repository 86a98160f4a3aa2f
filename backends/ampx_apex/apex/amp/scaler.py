"""Loss scales: one a loss id, moved when a `scale_loss` block is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from ampx.events import Event, StepSkipped
from ampx.protocol import ScaleGroup
from ampx.scale_state import LossScale, LossScaleState, next_state
from ampx_apex.apex import amp_c

from ._amp_state import _amp_state

if TYPE_CHECKING:
    from .opt import ApexOptimizer

# An event, and the group whose listeners are to hear of it.
Due: TypeAlias = tuple[ScaleGroup, Event]

# apex let a scale without a floor fall to zero, and a division by it ended the run.
LOWEST: Final = 2.0**-24
HIGHEST: Final = 2.0**24


def configure(loss_scale: float | str, lowest: float | None, highest: float | None) -> LossScale:
    """Return the configuration of a loss scale that is `"dynamic"` or a number; None stands for apex's bounds."""
    if not isinstance(loss_scale, str):
        return LossScale.static(loss_scale)
    top = HIGHEST if highest is None else highest
    bottom = lowest or min(LOWEST, top)
    default = LossScale()
    return replace(default, init_scale=max(bottom, min(default.init_scale, top)), min_scale=bottom, max_scale=top)


class LossScaler:
    """One loss scale as scripts know it; the numbers are those of ampx's state machine.

    Attributes:
        group: The optimizers that share it.
        loss_id: Which of their loss scales it is.
    """

    has_fused_kernel = True
    multi_tensor_scale_cuda = staticmethod(amp_c.multi_tensor_scale)
    multi_tensor_axpby_cuda = staticmethod(amp_c.multi_tensor_axpby)

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = HIGHEST,
    ) -> None:
        config = configure(loss_scale, min_loss_scale, max_loss_scale)
        if config.dynamic:
            first = max(config.min_scale, min(init_scale, config.max_scale))
            config = replace(
                config,
                init_scale=first,
                growth_factor=scale_factor,
                backoff_factor=1 / scale_factor,
                growth_interval=scale_window,
            )
        self._look_at(ScaleGroup("torch", config), 0, "cpu")

    @classmethod
    def of(cls, group: ScaleGroup, loss_id: int, device: str) -> LossScaler:
        """Return the loss scale of a group for one loss id; its overflow buffer is on a device."""
        scaler = cls.__new__(cls)
        scaler._look_at(group, loss_id, device)
        return scaler

    def _look_at(self, group: ScaleGroup, loss_id: int, device: str) -> None:
        self.group = group
        self.loss_id = loss_id
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
        group.states.setdefault(loss_id, group.config.initial_state())

    def loss_scale(self) -> float:
        """Return the current loss scale."""
        return float(self._state.scale)

    @property
    def dynamic(self) -> bool:
        """Whether it moves."""
        return self.group.config.dynamic

    @property
    def _state(self) -> LossScaleState:
        return self.group.state_of(self.loss_id)

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.group.states[self.loss_id] = replace(self._state, scale=float(value))

    @property
    def _unskipped(self) -> int:
        return int(self._state.growth_tracker)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.group.states[self.loss_id] = replace(self._state, growth_tracker=int(value))

    @property
    def _min_loss_scale(self) -> float:
        return self.group.config.min_scale

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        config = self.group.config
        lowest = value or min(LOWEST, config.max_scale)
        self.group.config = replace(config, min_scale=lowest, init_scale=max(lowest, config.init_scale))

    @property
    def _max_loss_scale(self) -> float:
        return self.group.config.max_scale

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float) -> None:
        config = self.group.config
        self.group.config = replace(config, max_scale=value, init_scale=min(value, config.init_scale))

    @property
    def _scale_seq_len(self) -> int:
        return self.group.config.growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self.group.config = replace(self.group.config, growth_interval=value)

    # -- what scripts call that unscale, or reduce over processes, themselves ----------------------

    def clear_overflow_state(self) -> None:
        """Forget the overflows that `unscale` saw."""
        self._has_overflow = False
        self._overflow_buf.zero_()

    def unscale(
        self,
        model_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        unused_scale: Any = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write gradients divided by the loss scale, and note whether they are finite for `update_scale`."""
        if not self._has_overflow:
            scale = self.loss_scale() if scale_override is None else scale_override
            amp_c.multi_tensor_scale(0, self._overflow_buf, [model_grads, master_grads], 1.0 / scale)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[torch.Tensor],
        stashed_master_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write the sum of scaled gradients, which are tested, divided by the loss scale, and of others.

        `scale_override` has the scales that the gradients have, that the others have, and that the sum shall have.
        """
        if not self._has_overflow:
            have, others, wanted = scale_override or (self.loss_scale(), 1.0, 1.0)
            lists = [model_grads, stashed_master_grads, master_grads]
            amp_c.multi_tensor_axpby(0, self._overflow_buf, lists, wanted / have, wanted / others, 0)

    def update_scale(self) -> bool:
        """Move the loss scale by what `_overflow_buf` says, for blocks with `delay_overflow_check=True`.

        After an overflow, which is returned, the next step is skipped, also if the script calls it. Sync: one.
        """
        if not self._has_overflow:
            self._has_overflow = bool(self._overflow_buf.item())
        verdict = Verdict(finite=not self._has_overflow, moved=True)
        for optimizer in list(_amp_state.optimizers):
            if optimizer.ampx_member.group is self.group and self.loss_id in optimizer.pending:
                optimizer.pending[self.loss_id] = [verdict]
                settle(optimizer, self.loss_id)
        send(_move(self.group, self.loss_id, verdict.finite))
        return self._has_overflow


@dataclass(eq=False)
class Verdict:
    """What one block's backward showed, shared by its optimizers: all is finite; the loss scale moved by it."""

    finite: bool = True
    moved: bool = False


def settle(optimizer: ApexOptimizer, loss_id: int) -> list[Due]:
    """Have an optimizer skip where a block overflowed, move the scale unless another has; return what to `send`."""
    verdicts = optimizer.pending.get(loss_id, [])
    optimizer.note(loss_id, all(verdict.finite for verdict in verdicts))
    new = [verdict for verdict in verdicts if not verdict.moved]
    for verdict in new:
        verdict.moved = True
    return _move(optimizer.ampx_member.group, loss_id, all(verdict.finite for verdict in new)) if new else []


def _move(group: ScaleGroup, loss_id: int, finite: bool) -> list[Due]:
    before = group.state_of(loss_id)
    after = group.states[loss_id] = next_state(group.config, before, finite)
    fields = (group.framework, group.index, loss_id, group.steps + 1)  # the step that is to come
    events = group.events_of(fields, before, after, finite)
    return [(group, event) for event in events if not isinstance(event, StepSkipped)]  # that one is sent by the step


def send(events: Sequence[Due]) -> None:
    """Send events; last in every call, because listeners may look at everything, call back, or raise."""
    for group, event in events:
        group.send(event)


def tell_skipped(group: ScaleGroup, loss_id: int, scale: Any) -> None:
    """Send the event that a step was skipped because of one loss."""
    state = group.state_of(loss_id)
    fields = (group.framework, group.index, loss_id, group.steps)
    group.send(StepSkipped(*fields, float(scale), float(state.scale), int(state.consecutive_skips)))
