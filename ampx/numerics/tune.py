"""Find which modules must stay in float32, for safety and for speed, by measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampx.policy import OptLevel

from .batch import plain


@dataclass(frozen=True)
class Choice:
    """An entry of `allow` or `deny`, and what was measured that speaks for it.

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
        reasons: Why, by `"dtype"`, `"level"` and `"loss_scale"`: one sentence each.
        modules: Names of all modules of the model, by which a file that is stale is known.
        agrees: Whether loss and gradients agree with float32's within the tolerance.
        tolerance: Relative tolerance of loss and gradients.
        speed: Steps per second over those of float32 on this device; None where that was not measured.
        replays: How often the batch was computed.
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

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        result: dict[str, Any] = plain(self)
        return result


def minimal(names: Sequence[str], passes: Callable[[frozenset[str]], bool]) -> frozenset[str] | None:
    """Return a smallest set of names that passes, with few calls of `passes`.

    It is exact where every superset of a set that passes does so, too. Elsewhere it is a set that passes. Of `n` names
    of which `k` are needed it calls `passes` at most `2 k log2(n) + 10` times.

    Names that are needed are found one by one: that which completes the shortest beginning of `names` that passes is
    one. The length is searched in steps that double, so that names in front, the likely ones, are found in few calls.

    Args:
        names: All names, the likeliest first.
        passes: Returns whether a set is enough.

    Returns:
        The names; None where not even all together pass.
    """
    needed: frozenset[str] = frozenset()
    if passes(needed):
        return needed
    candidates = list(dict.fromkeys(names))
    if not candidates or not passes(frozenset(candidates)):
        return None
    while True:
        failing, passing = 0, len(candidates)  # lengths of beginnings
        length = 1
        while length < passing and not passes(needed | frozenset(candidates[:length])):
            failing, length = length, 2 * length
        passing = min(passing, length)
        while passing - failing > 1:
            middle = (failing + passing) // 2
            if passes(needed | frozenset(candidates[:middle])):
                passing = middle
            else:
                failing = middle
        needed |= {candidates[passing - 1]}
        candidates = candidates[: passing - 1]
        if not candidates or passes(needed):
            return needed
