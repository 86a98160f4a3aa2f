"""Loss scales: one a loss id, moved when a `scale_loss` block is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ampx.events import StepSkipped
from ampx.group import ScaleGroup
from ampx.scale_state import LossScale, LossScaleState, next_state

if TYPE_CHECKING:
    from .opt import ApexOptimizer

# apex let a scale without a floor fall to zero, and a division by it ended the run.
LOWEST: Final = 2.0**-24
HIGHEST: Final = 2.0**24


def configure(loss_scale: float | str, lowest: float | None, highest: float | None) -> LossScale:
    """Give the configuration of a loss scale.

    Args:
        loss_scale: `"dynamic"` or a number.
        lowest: `min_loss_scale`; None for no floor but 2**-24.
        highest: `max_loss_scale`; None for 2**24.

    Raises:
        InvalidOptionError: A bound is not positive, or they exclude each other.

    Sync: none.
    """
    if not isinstance(loss_scale, str):
        return LossScale.static(loss_scale)
    top = HIGHEST if highest is None else highest
    bottom = lowest or min(LOWEST, top)
    default = LossScale()
    return replace(default, init_scale=max(bottom, min(default.init_scale, top)), min_scale=bottom, max_scale=top)


class LossScaler:
    """One loss scale as scripts know it; the numbers are those of ampx's state machine."""

    def __init__(self, group: ScaleGroup, loss_id: int) -> None:
        """Look at one loss id of a group."""
        self.group = group
        self.loss_id = loss_id
        group.state_of(loss_id)

    def loss_scale(self) -> float:
        """Give the current loss scale. Sync: none."""
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

    @property
    def _max_loss_scale(self) -> float:
        return self.group.config.max_scale

    @property
    def _scale_seq_len(self) -> int:
        return self.group.config.growth_interval


def settle(optimizers: Sequence[ApexOptimizer], loss_id: int) -> None:
    """Move the loss scale by what one backward showed, and have all its optimizers skip if it overflowed.

    Args:
        optimizers: All whose gradients the backward made.
        loss_id: Whose scale moves.

    Sync: none.
    """
    found = [one.found.pop(loss_id) for one in optimizers if loss_id in one.found]
    if not found:
        return
    finite = all(found)
    for one in optimizers:
        one.note(loss_id, finite)
    for group in {id(one.ampx_member.group): one.ampx_member.group for one in optimizers}.values():
        _move(group, loss_id, finite)  # last, because listeners may raise


def _move(group: ScaleGroup, loss_id: int, finite: bool) -> None:
    before = group.state_of(loss_id)
    after = group.states[loss_id] = next_state(group.config, before, finite)
    if group.emit is None:
        return
    told = (group.framework, group.index, loss_id, group.steps + 1)  # the step that is to come
    for event in group.events_of(told, before, after, finite):
        if not isinstance(event, StepSkipped):  # that one is sent by the step
            group.emit(group.framework, event)


def tell_skipped(group: ScaleGroup, loss_id: int, scale: Any) -> None:
    """Send the event that a step was skipped because of one loss. Sync: none."""
    state = group.state_of(loss_id)
    if group.emit is not None:
        told = (group.framework, group.index, loss_id, group.steps)
        group.emit(group.framework, StepSkipped(*told, float(scale), float(state.scale), int(state.consecutive_skips)))
