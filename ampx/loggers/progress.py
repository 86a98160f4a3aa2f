"""`Progress`: how far training is, sent every so many steps of each loss scale while there are logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from ampx.events import Event, Progress
from ampx.protocol import MoveObserver, Outcome, ScaleGroup
from ampx.scale_state import LossScaleState
from ampx.session import sessions


class ProgressObserver(MoveObserver):
    """Makes `Progress` for all logs of the process."""

    def __init__(self) -> None:
        """Start without logs."""
        self.intervals: list[int] = []

    def moved(
        self, group: ScaleGroup, before: Mapping[int, LossScaleState], window: Sequence[Outcome]
    ) -> Iterator[Event]:
        """Return `Progress` of the step for every loss id; a norm is read when it is sent."""
        skipped = any(False in outcome.finite.values() for outcome in window)
        norms = () if skipped else tuple(outcome.grad_norm for outcome in window)
        return _events(group, group.steps, before, dict(group.states), dict(group.skipped), norms)


_observer: Final = ProgressObserver()


def report_every(every: int) -> Callable[[], None]:
    """Send `Progress` of every so many steps of each loss scale, until the function that this returns is called."""
    _observer.intervals.append(every)
    _attach()

    def end() -> None:
        _observer.intervals.remove(every)
        _attach()

    return end


def _attach() -> None:
    ScaleGroup.observer = _observer if _observer.intervals else None
    for group in sessions.living_groups():
        group.ledger.pace(group)


def _events(
    group: ScaleGroup,
    step: int,
    before: Mapping[int, LossScaleState],
    after: Mapping[int, LossScaleState],
    skipped: Mapping[int, int],
    norms: tuple[Any, ...],
) -> Iterator[Event]:
    if None in norms and step == group.steps:  # steps of compiled code leave their norm with the member
        norms = tuple(None if member.result is None else member.result.grad_norm for member in group.members)
    numbers = [float(norm) for norm in norms if norm is not None]
    norm = math.hypot(*numbers) if numbers and len(numbers) == len(norms) else None
    for loss_id, state in sorted(after.items()):
        scale = (before.get(loss_id) or group.config.initial_state()).scale
        labels = (group.framework, group.index, loss_id, step)
        yield Progress(*labels, scale, state.scale, state.consecutive_skips, skipped.get(loss_id, 0), norm)
