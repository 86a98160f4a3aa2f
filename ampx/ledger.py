"""Where a loss scale lives: on the host, or wherever a backend keeps it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from .scale_state import Scalar

if TYPE_CHECKING:
    from .group import Outcome, ScaleGroup


class Ledger(abc.ABC):
    """Keeps a group's scale and settles its windows. The host default settles at once."""

    @abc.abstractmethod
    def factor(self, group: ScaleGroup, loss_id: int) -> Scalar:
        """Give the scale for a loss: a Python float, or a float32 scalar on the device. Sync: none."""

    @abc.abstractmethod
    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale after a window's last member stepped. Sync: as the backend says."""

    @abc.abstractmethod
    def resolve(self, group: ScaleGroup) -> None:
        """Bring the host's view up to date. Sync: allowed."""

    def close(self, group: ScaleGroup) -> None:
        """Bring the host's view up to date for the last time, because the session ends. Sync: allowed."""
        group.resolve()

    @abc.abstractmethod
    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Tell the finiteness by loss id of a step whose window is not settled yet. Sync: allowed."""

    @abc.abstractmethod
    def reload(self, group: ScaleGroup) -> None:
        """Take over the group's states after they were loaded. Sync: allowed."""


class HostLedger(Ledger):
    """The scale is a Python number and moves as soon as the last member stepped."""

    def factor(self, group: ScaleGroup, loss_id: int) -> float:
        """Give the scale for a loss."""
        scale: float = group.state_of(loss_id).scale
        return scale

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale at once."""
        group.advance(window)

    def resolve(self, group: ScaleGroup) -> None:
        """Do nothing: the host's view is the only one."""

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Tell what the host knew at once."""
        return outcome.finite

    def reload(self, group: ScaleGroup) -> None:
        """Do nothing: the group's states are the scale."""


HOST_LEDGER: Final = HostLedger()
