"""The loss scale of steps that a CUDA graph replays: what a step changes keeps its address.

A replayed step runs no Python. So the whole state of the scale is on the device, moves by the specification itself,
and every step is logged there. The host reads the log when someone asks, and then sends the events.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import torch

from ampx.errors import AmpxWarning, ProtocolError, UnsupportedByBackendError
from ampx.protocol import Outcome, ScaleGroup
from ampx.scale_state import LossScaleState, next_state

from . import TensorLedger

LOG: Final = 4096
"""So many steps are remembered on the device."""
_IDLE: Final = -1.0  # in place of a flag: this member had nothing to step
_FIELDS: Final = tuple(field.name for field in fields(LossScaleState))
_DTYPES: Final = {"scale": torch.float32}  # the others count


class _Memory:
    """The tensors that steps write to, never replaced."""

    def __init__(self, state: LossScaleState, members: int, device: torch.device) -> None:
        def scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((), value, dtype=dtype, device=device)

        # The scale's state after the last step.
        self.state = LossScaleState(*[scalar(getattr(state, name), _DTYPES.get(name, torch.int32)) for name in _FIELDS])
        # A row a step: the state before it, and the overflow flag of every member.
        self.log = torch.zeros(LOG, len(_FIELDS) + members, dtype=torch.float32, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # steps so far, shape (1,)
        # The norm that each member found last; NaN where it was not asked for.
        self.norms = [scalar(float("nan"), torch.float32) for _ in range(members)]
        self.idle = scalar(_IDLE, torch.float32)

    def write(self, state: LossScaleState) -> None:
        """Take over a state."""
        for name in _FIELDS:
            target, value = getattr(self.state, name), getattr(state, name)
            if isinstance(value, torch.Tensor):
                target.copy_(value)
            else:
                target.fill_(value)


class CapturableLedger(TensorLedger):
    """Keeps one group's scale on one device, in tensors written in place; they are made before a capture."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._memory: _Memory | None = None
        self._seen = 0  # logged steps that the host knows

    def factor(self, group: ScaleGroup, loss_id: int) -> torch.Tensor:
        """Return the scale: a float32 scalar on the device."""
        if loss_id != 0:
            raise UnsupportedByBackendError(
                f"scale_loss got loss_id={loss_id} for an optimizer wrapped with capturable=True; accepted: 0. Leave "
                f"loss_id out, or wrap the optimizer without capturable."
            )
        if self._memory is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ProtocolError(
                    "the first scale_loss of an optimizer came inside a CUDA graph capture, so that every replay would "
                    "start the loss scale anew; accepted: a capture after some ordinary steps. Run three steps first."
                )
            self._memory = _Memory(group.state_of(0), len(group.members), self.device)
        scale: torch.Tensor = self._memory.state.scale
        return scale

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale on the device and log the step."""
        self.factor(group, 0)
        memory: Any = self._memory
        outcomes = {outcome.member: outcome for outcome in window}
        flags = [outcomes[member].finite[0] if member in outcomes else memory.idle for member in group.members]
        before = [getattr(memory.state, name).float() for name in _FIELDS]
        memory.log.index_copy_(0, memory.count.remainder(LOG), torch.stack([*before, *flags])[None])
        memory.count.add_(1)
        for place, member in zip(memory.norms, group.members, strict=True):
            if member in outcomes and outcomes[member].grad_norm is not None:
                place.copy_(outcomes[member].grad_norm)
        finite = torch.stack(flags).amax() <= 0
        memory.write(next_state(group.config, memory.state, finite, torch.where))

    def resolve(self, group: ScaleGroup) -> None:
        """Replay on the host what the log tells. Sync: one; more where steps came since the last time."""
        memory = self._memory
        if memory is None or (total := int(memory.count)) == self._seen:
            return
        first = max(self._seen, total - LOG)
        lost, self._seen = first - self._seen, total
        rows = memory.log[[step % LOG for step in range(first, total)]].tolist()
        if lost:
            scale, *counters = rows[0][: len(_FIELDS)]
            group.states[0] = LossScaleState(scale, *map(int, counters))
            group.steps += lost
            warnings.warn(
                f"{lost} replayed steps were overwritten in the log before anyone asked; their events are lost, the "
                f"loss scale is right. Read opt.loss_scale or opt.last_step at least every {LOG} steps.",
                AmpxWarning,
                stacklevel=2,
            )
        for number, row in enumerate(rows, 1):
            scale, window = group.state_of(0).scale, []
            for member, flag, norm in zip(group.members, row[len(_FIELDS) :], memory.norms, strict=True):
                if flag != _IDLE:
                    grad_norm = norm.item() if number == len(rows) else math.nan
                    window.append(Outcome(member, {0: flag == 0}, scale, None if math.isnan(grad_norm) else grad_norm))
            group.advance(window)

    def reload(self, group: ScaleGroup) -> None:
        """Put the group's state where captured steps read it."""
        if self._memory is not None:
            self._memory.write(group.state_of(0))
