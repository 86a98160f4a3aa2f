"""`Progress`: events of how far training is, every so many steps of each loss scale, for as long as somebody logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from .events import Event, Progress
from .protocol import MoveObserver, Outcome, ScaleGroup
from .scale_state import LossScaleState

LOG_EVERY: Final = 100  # steps between two rows of a log, unless it is asked for another number
intervals: Final[list[int]] = []  # every so many steps a log wants `Progress`
on_change: Final[list[Callable[[], None]]] = []  # called when these changed, where steps wait for the host to look


def report_every(every: int) -> Callable[[], None]:
    """Have `Progress` of every so many steps of each loss scale sent; the result of this ends that."""
    intervals.append(every)
    _changed()

    def end() -> None:
        intervals.remove(every)
        _changed()

    return end


def _changed() -> None:
    ScaleGroup.observer = _OBSERVER if intervals else None
    for look in on_change:
        look()


def is_due(step: int, since: int | None = None) -> bool:
    """Return whether a log wants `Progress` of a step.

    Args:
        step: Its number.
        since: The last step that the host knew of; by default the one before.
    """
    before = step - 1 if since is None else since
    return any(step // every > before // every for every in intervals)


class _ProgressObserver(MoveObserver):
    def moved(
        self, group: ScaleGroup, before: Mapping[int, LossScaleState], window: Sequence[Outcome]
    ) -> Iterator[Event] | None:
        """Return `Progress` of a step that is due."""
        if not is_due(group.steps):
            return None
        skipped = any(False in outcome.finite.values() for outcome in window)
        norms = () if skipped else tuple(outcome.grad_norm for outcome in window)
        return _events(group, group.steps, before, dict(group.states), dict(group.skipped), norms)


_OBSERVER: Final = _ProgressObserver()


def _events(
    group: ScaleGroup,
    step: int,
    before: Mapping[int, LossScaleState],
    after: Mapping[int, LossScaleState],
    skipped: Mapping[int, int],
    norms: tuple[Any, ...],
) -> Iterator[Event]:
    """Return `Progress` of one step, one for every loss id. Sync: where a norm is on the device."""
    if None in norms and step == group.steps:  # steps of compiled code leave their norm with the member
        norms = tuple(None if member.result is None else member.result.grad_norm for member in group.members)
    numbers = [float(norm) for norm in norms if norm is not None]
    norm = math.hypot(*numbers) if numbers and len(numbers) == len(norms) else None
    for loss_id, state in sorted(after.items()):
        scale = (before.get(loss_id) or group.config.initial_state()).scale
        labels = (group.framework, group.index, loss_id, step)
        yield Progress(*labels, scale, state.scale, state.consecutive_skips, skipped.get(loss_id, 0), norm)
