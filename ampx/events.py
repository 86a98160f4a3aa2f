"""What a step reports: its result, and the events that listeners and plugins receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. Inside traced code the fields hold tensors.

    Attributes:
        applied: The optimizer ran. False: the step was skipped, or there was no gradient.
        finite: All gradients were finite. None when nothing was checked (`enabled=False`).
        scale: Loss scale that this step's gradients carried.
        next_scale: Loss scale for the next `scale_loss`.
        consecutive_skips: Skipped steps of the loss scale in a row, this one included. Optimizers that share a
            loss scale share the count: it can be 1 for a member that was applied while another was not.
        grad_norm: L2 norm of the unscaled gradients before clipping, where clipping asked for it; else None, as after
            a skipped step, whose gradients have no norm.

    Example:
        >>> skipped = not optimizer.last_step.applied
    """

    applied: bool
    finite: bool | None
    scale: float
    next_scale: float
    consecutive_skips: int
    grad_norm: float | None = None


# What a step reports when the session is disabled.
UNCHECKED = StepResult(True, None, 1.0, 1.0, 0)


@dataclass(frozen=True)
class Event:
    """The fields that all events have, with the same meaning in every framework.

    Attributes:
        framework: Name of the framework.
        group: Position of the loss scale in `amp.state_dict()`, counted in order of wrapping.
        loss_id: Which of the group's loss scales; 0 unless `scale_loss` was given another.
        step: Number of counted steps of the group, this one included.
        scale: Loss scale of the step.
        next_scale: Loss scale after the step.
        consecutive_skips: Skipped steps in a row, this one included.
    """

    framework: str
    group: int
    loss_id: int
    step: int
    scale: float
    next_scale: float
    consecutive_skips: int


@dataclass(frozen=True)
class StepSkipped(Event):
    """A step was not applied because a gradient was not finite."""


@dataclass(frozen=True)
class ScaleChanged(Event):
    """The loss scale grew or backed off."""


@dataclass(frozen=True)
class ScaleCollapsed(Event):
    """So many steps in a row were skipped as `LossScale.max_consecutive_skips` says.

    Attributes:
        parameters: Names of the parameters whose gradients are not finite, where the backend can tell.
    """

    parameters: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        """What to run to learn where it fails, and why."""
        return "`ampx diagnose` of the script, or ampx.diagnose(step, model), says where and why."


@dataclass(frozen=True)
class PrecisionLost(Event):
    """An update lost too much in low precision: `lost` is at least 0.5, or `flushed` at least 0.1.

    Attributes:
        lost: Share of the elements with a gradient whose weight did not change.
        flushed: Share of the elements with a gradient that the compute dtype rounds to zero, scaled as it is.
    """

    lost: float = 0.0
    flushed: float = 0.0


LOG_EVERY: Final = 100  # steps between two `Progress` for a log, unless it is asked for another number


@dataclass(frozen=True)
class Progress(Event):
    """How far training is, every so many steps; sent only while `log_to` writes.

    Attributes:
        skipped: Skipped steps of the loss scale so far, in this process; in JAX, since the state was made.
        grad_norm: L2 norm of the unscaled gradients of all optimizers that share the loss scale, before clipping, where
            clipping measured it; else None, as after a skipped step.
    """

    skipped: int = 0
    grad_norm: float | None = None


@dataclass(frozen=True)
class UpdateMetered(Event):
    """What the meter measured of an update, every hundredth step; sent only while `log_to` writes.

    Attributes:
        lost: Share of the elements with a gradient whose weight did not change.
        flushed: Share of the elements with a gradient that the compute dtype rounds to zero, scaled as it is.
        headroom: Bits from the largest gradient element, scaled as it is, to overflow; None without such an element.
    """

    lost: float = 0.0
    flushed: float = 0.0
    headroom: float | None = None


Listener: TypeAlias = Callable[[Event], Any]
