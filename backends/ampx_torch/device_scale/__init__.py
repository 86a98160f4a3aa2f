"""The loss scale on the device: nothing in a step waits for it.

The device moves the scale with torch's own update kernel. The host keeps the finiteness flags of the steps it
has not looked at yet and replays the state machine over them when someone asks, or when a batch of flags has
arrived by an asynchronous copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ampx.protocol import Ledger, Outcome, ScaleGroup
from ampx.scale_state import FLOAT32_MAX, LossScale, LossScaleState, next_state, round_to_float32

# So many unread steps start a copy to the host; events are late by at most twice as many steps.
BATCH = 32


@dataclass
class _Batch:
    """Flags on their way to the host."""

    windows: list[list[Outcome]]
    flags: torch.Tensor
    arrived: torch.cuda.Event | None


class TensorLedger(Ledger):
    """A ledger whose scale and flags are tensors on one device, made on first use."""

    on_device: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Look at the flags now. Sync: one a loss id."""
        return {loss_id: not bool(flag) for loss_id, flag in outcome.finite.items()}

    def flag(self, finite: bool | torch.Tensor) -> torch.Tensor:
        """Return a flag on the device; a bool, where the host knows, says whether all was finite."""
        if isinstance(finite, torch.Tensor):
            return finite
        return torch.full((), float(not finite), dtype=torch.float32, device=self.device)

    def bounds(self, group: ScaleGroup, loss_id: int, scale: torch.Tensor) -> tuple[float, float]:
        """Return between which numbers a scale that gradients carry is, as far as is known without looking at it."""
        if scale is not self.factor(group, loss_id):
            return 0.0, math.inf  # another optimizer's
        config = group.config
        outer = (config.min_scale, config.max_scale) if config.dynamic else (config.init_scale,)
        scales = [*outer, *(state.scale for state in group.states.values())]
        return min(scales), max(scales)


class DeviceLedger(TensorLedger):
    """Keeps one group's scale on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._states: dict[int, LossScaleState] = {}
        # Losses whose scale moves by the specification itself, in a few kernels more than torch's own.
        self._exact: set[int] = set()
        self._unread: list[list[Outcome]] = []
        self._flying: deque[_Batch] = deque()
        self._moving = False  # an exception has come between the device's move and the note of it

    def factor(self, group: ScaleGroup, loss_id: int) -> torch.Tensor:
        """Return the scale: a float32 scalar on the device."""
        if self._moving:
            self._start_again(group)
        scale: torch.Tensor = self._state(group, loss_id).scale
        return scale

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale on the device; the host learns of it later."""
        if self._moving:
            self._start_again(group)
        self._moving = True
        window = list(window)
        for loss_id in {loss_id for outcome in window for loss_id in outcome.finite}:
            flags = [outcome.finite[loss_id] for outcome in window if loss_id in outcome.finite]
            flag = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
            self._states[loss_id] = _move(group.config, self._state(group, loss_id), flag, loss_id in self._exact)
        self._unread.append(window)
        self._moving = False
        self._land(group, wait=False)
        if len(self._unread) >= BATCH:
            self._send()

    def resolve(self, group: ScaleGroup) -> None:
        """Replay all steps on the host. Sync: one where steps are unread."""
        if self._unread:
            self._send()
        self._land(group, wait=True)

    def reload(self, group: ScaleGroup) -> None:
        """Put the group's states on the device."""
        self._states = {}
        self._exact = set()
        self._moving = False

    def _start_again(self, group: ScaleGroup) -> None:
        """Go on from what the host knows, because a move was interrupted. Sync: one where steps are unread."""
        self.resolve(group)
        self.reload(group)

    def _state(self, group: ScaleGroup, loss_id: int) -> LossScaleState:
        state = self._states.get(loss_id)
        if state is None:
            host = group.state_of(loss_id)
            if _needs_specification(group.config, host.scale):
                self._exact.add(loss_id)
            # torch's kernel grows at equality; one short of the interval is what "at or beyond" means there.
            tracker = min(host.growth_tracker, group.config.growth_interval - 1)
            with torch.inference_mode(False):  # backward could not save a scale that was made in inference mode
                state = self._states[loss_id] = LossScaleState(
                    torch.full((), host.scale, dtype=torch.float32, device=self.device),
                    torch.full((), tracker, dtype=torch.int32, device=self.device),
                    torch.full((), host.hysteresis_tracker, dtype=torch.int32, device=self.device),
                    torch.full((), host.consecutive_skips, dtype=torch.int32, device=self.device),
                )
        return state

    def _send(self) -> None:
        windows, self._unread = self._unread, []
        flags = torch.stack([flag for window in windows for outcome in window for flag in outcome.finite.values()])
        arrived = None
        if self.device.type == "cuda":
            flags = flags.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self.device))
        self._flying.append(_Batch(windows, flags, arrived))

    def _land(self, group: ScaleGroup, wait: bool) -> None:
        while self._flying:
            batch = self._flying[0]
            if batch.arrived is not None:
                if wait:
                    batch.arrived.synchronize()
                elif not batch.arrived.query():
                    return
            self._flying.popleft()
            flags = iter(batch.flags.tolist())
            for window in batch.windows:
                for outcome in window:
                    outcome.finite = {loss_id: not next(flags) for loss_id in outcome.finite}
                    outcome.scale = group.state_of(min(outcome.finite)).scale
                group.advance(window)


def _move(config: LossScale, state: LossScaleState, flag: torch.Tensor, exact: bool) -> LossScaleState:
    if not config.dynamic:
        return state
    if exact:
        with torch.inference_mode(False):
            return next_state(config, state, flag == 0, torch.where)
    torch._amp_update_scale_(
        state.scale,
        state.growth_tracker,
        flag,
        round_to_float32(config.growth_factor),
        round_to_float32(config.backoff_factor),
        config.growth_interval,
    )
    state.scale.clamp_(config.min_scale, config.max_scale)
    return state


def _needs_specification(config: LossScale, scale: float) -> bool:
    """Return what torch's kernel and a clamp cannot do.

    The kernel has no hysteresis and does not grow into infinity, where the specification stops at max_scale; a
    clamp would move a loaded scale that is out of bounds before its time.
    """
    out_of_bounds = not config.min_scale <= scale <= config.max_scale
    return config.hysteresis > 1 or out_of_bounds or config.max_scale * config.growth_factor > FLOAT32_MAX
