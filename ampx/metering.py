"""What core and backends know of the meter: how often it looks, and what stands for it where it was taken out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .protocol import StepObserver
from .rooms import import_part, is_there

METER_EVERY: Final = 100
METER_SAMPLES: Final = 4096
_METER: Final = "ampx.numerics.host_meter"  # loaded by the first optimizer that has one


def default_meter_every() -> int:
    """Return `METER_EVERY`; 0 where the meter was taken out."""
    return METER_EVERY if is_there(_METER) else 0


class NoMeter(StepObserver):
    """Stands for the meter where that was taken out: it looks at no step."""

    def before(self, optimizer: Any) -> bool:
        """Return that nothing looks at a step that begins."""
        return False

    def after(self, optimizer: Any, finite: Mapping[int, Any]) -> None:
        """Look at nothing."""

    def last(self) -> None:
        """Return that no update was looked at."""


def make_meter(compute: str, look: Callable[[Any, bool], Any]) -> Any:
    """Make the meter of an optimizer whose loss scale lives on the host, an `ampx.numerics.host_meter.HostMeter`.

    Args:
        compute: The compute dtype.
        look: As the meter takes it.
    """
    return import_part(_METER, "the meter").HostMeter(compute, look) if is_there(_METER) else NoMeter()
