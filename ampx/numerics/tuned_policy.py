"""The answer of `tune`: what to compute in which dtype, each choice with what was measured."""

from __future__ import annotations

import glob
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_args

from ampx.backend import MODULE
from ampx.errors import UnsupportedDtypeError
from ampx.policy import Dtype, OptLevel, PolicyFile

from .batch import plain
from .timing import speed_in_words

DISABLED: Final = "nothing is left but to check gradients; true does so, at the cost of a small step's time"


@dataclass(frozen=True)
class Choice:
    """An entry of `allow` or `deny`, and the measurement behind it.

    Attributes:
        entry: As `init` takes it: `"module:name"`, or the name of an operation.
        reason: One sentence with the numbers.
    """

    entry: str
    reason: str


@dataclass(frozen=True)
class TunedPolicy:
    """What to compute in which dtype, measured.

    Attributes:
        framework: Name of the framework.
        device: Name of the device that it was measured on.
        dtype: The compute dtype; `"float32"` where low precision does not pay.
        level: The opt level.
        loss_scale: As `init` takes it: `"dynamic"`, or a number.
        deny: What stays in float32.
        allow: What computes in the dtype beyond the framework's own list.
        reasons: Why, by `"dtype"`, `"level"`, `"loss_scale"` and `"enabled"`: one sentence each.
        modules: Names of all modules of the model, by which a file that is stale is known.
        agrees: Whether loss and gradients agree with float32's within the tolerance.
        tolerance: Relative tolerance of loss and gradients, the larger one.
        speed: Steps per second over those of float32 on this device; None where that was not measured.
        replays: How often the batch was computed.
        operations: Operations that could stay in float32 instead of the modules, wherever they are; () where that is
            not enough, or where it was not asked.
        enabled: As `init` takes it. False where float32 is the fastest: calls of ampx cast and scale nothing there,
            and would add their check of gradients to each step.
    """

    framework: str
    device: str
    dtype: str
    level: OptLevel
    loss_scale: str | float
    deny: tuple[Choice, ...] = ()
    allow: tuple[Choice, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    agrees: bool = True
    tolerance: float = 0.0
    speed: float | None = None
    replays: int = 0
    operations: tuple[str, ...] = ()
    enabled: bool = True

    @property
    def file(self) -> PolicyFile:
        """What `init(policy=…)` reads, with the reasons as comments."""
        reasons = {choice.entry: choice.reason for choice in (*self.deny, *self.allow)}
        return PolicyFile(
            self.framework,
            self.dtype,
            self.level,
            self.loss_scale if self.loss_scale == "dynamic" else "auto",
            tuple(choice.entry for choice in self.allow),
            tuple(choice.entry for choice in self.deny),
            {**self.reasons, **reasons},
            enabled=self.enabled,
        )

    def write(self, path: str | os.PathLike[str] = "ampx.toml") -> None:
        """Write the policy file, for `init(policy=…)` and `ampx run --policy`.

        Where there is one already, the comments and entries that a person added to it stay.

        Raises:
            PolicyFileError: The file that is there is no TOML.
            UnsupportedDtypeError: The dtype was simulated, and no framework trains in it.
        """
        accepted = get_args(Dtype)
        if self.dtype not in accepted:
            raise UnsupportedDtypeError(
                f"a policy in {self.dtype} cannot be used; accepted: {', '.join(accepted)}. It answers what would be; "
                f"tune without what_if for one that this device computes."
            )
        path = Path(path)
        before = path.read_bytes() if path.is_file() else b""
        path.write_text(self.file.text(before, str(path)), encoding="utf-8")

    def timed(self, ratios: Sequence[float], slow: Mapping[str, tuple[float, float]]) -> TunedPolicy:
        """Return the policy with its speed, and with modules in float32 that lose time in low precision.

        Args:
            ratios: Steps per second over those of float32, by round.
            slow: The modules, with their seconds in low precision and in float32.
        """
        choices = [
            Choice(entry_of(name), f"{1e3 * low:.3g} ms in {self.dtype}, {1e3 * wide:.3g} ms in float32")
            for name, (low, wide) in slow.items()
        ]
        reason = f"{self.reasons['dtype']}; {speed_in_words(ratios)}"
        speed = statistics.median(ratios)
        return replace(self, deny=(*self.deny, *choices), speed=speed, reasons={**self.reasons, "dtype": reason})

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        result: dict[str, Any] = plain(self)
        return result


def in_float32(reason: str, agrees: bool = True, speed: float | None = None) -> dict[str, Any]:
    """Return the fields of the policy that casts nothing; one that was chosen for its `speed` switches ampx off."""
    why = {"dtype": reason, "level": "nothing is cast", "loss_scale": "float32 needs none", "enabled": DISABLED}
    return {
        "dtype": "float32",
        "level": "O0",
        "loss_scale": 1.0,
        "reasons": why,
        "agrees": agrees,
        "speed": speed,
        "enabled": speed is None,
    }


def entry_of(name: str) -> str:
    """Return the entry of `deny` for a module."""
    return MODULE + glob.escape(name)
