"""The specification of the loss scale, restated. It shares no line with the code that it judges.

Scales are held in an `array('f')`, so every assignment rounds to float32 as a device would.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

# native-facts: 1 is an overflow; scales after each step, from 2**16 with a growth interval of 3.
REFERENCE_PATTERN: Final = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
REFERENCE_TRACE: Final = (
    *(65536.0, 65536.0, 131072.0, 65536.0, 65536.0, 65536.0, 32768.0),
    *(16384.0, 16384.0, 16384.0, 32768.0, 32768.0, 32768.0, 65536.0),
)


@dataclass
class Row:
    """The four numbers after a step."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int
    consecutive_skips: int


class Oracle:
    """Walks one loss scale from a configuration, given as a dictionary of its fields."""

    def __init__(self, config: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config)
        start = state or {}
        self._scale = array("f", [start.get("scale", config["init_scale"])])
        self._good = int(start.get("growth_tracker", 0))
        self._lives = int(start.get("hysteresis_tracker", config["hysteresis"]))
        self._skips = int(start.get("consecutive_skips", 0))

    @property
    def row(self) -> Row:
        """The present numbers."""
        return Row(self._scale[0], self._good, self._lives, self._skips)

    def step(self, overflow: bool) -> Row:
        """Count one step."""
        if overflow:
            self._skips += 1
        else:
            self._skips = 0
        if not self.config["dynamic"]:
            return self.row
        if overflow:
            self._good = 0
            self._lives -= 1
            if self._lives <= 0:
                self._multiply("backoff_factor")
                self._lives = self.config["hysteresis"]
        else:
            self._good += 1
            self._lives = self.config["hysteresis"]
            if self._good >= self.config["growth_interval"]:
                self._multiply("growth_factor")
                self._good = 0
        return self.row

    def walk(self, pattern: Iterable[bool]) -> list[Row]:
        """Count a step for each entry; True is an overflow."""
        return [self.step(overflow) for overflow in pattern]

    def _multiply(self, name: str) -> None:
        factor = array("f", [self.config[name]])[0]
        exact = self._scale[0] * factor
        if name == "growth_factor":
            exact = min(exact, self.config["max_scale"])
        else:
            exact = max(exact, self.config["min_scale"])
        self._scale[0] = exact
