"""The loss scale: its configuration, its state and the one state machine that moves it.

The machine is framework-free. Comparisons and choices go through `where`, so the same lines run on
Python numbers, on device tensors and inside a traced function.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Final, TypeAlias, TypeGuard

from .errors import InvalidOptionError, shown

# A Python number, or a scalar tensor of some framework: only `where` knows which.
Scalar: TypeAlias = Any
Where: TypeAlias = Callable[[Scalar, Scalar, Scalar], Scalar]

FLOAT32_MAX: Final = 3.4028234663852886e38
FLOAT32_TINY: Final = 1.1754943508222875e-38


def round_to_float32(value: float) -> float:
    """Return the float32 nearest to a finite `value`, so that host and device traces are the same bits."""
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


@dataclass(frozen=True)
class LossScale:
    """How a loss scale starts and moves.

    Attributes:
        init_scale: First value.
        growth_factor: Factor on growth, at least 1.
        backoff_factor: Factor on overflow, in (0, 1].
        growth_interval: Finite steps in a row before growth.
        hysteresis: Overflows in a row until the scale backs off; 1 is at once.
        min_scale: The scale never goes below it.
        max_scale: The scale never goes above it.
        dynamic: False keeps the scale as it is; steps whose gradients are not finite are skipped all the same.
        max_consecutive_skips: Skipped steps in a row that make a `ScaleCollapsed` event.

    All scales are float32 values; a factor is rounded to float32 when it is used.

    Raises:
        InvalidOptionError: A value is out of range.

    Example:
        >>> amp = ampx.init("torch", dtype="float16", loss_scale=ampx.LossScale(growth_interval=500))
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    dynamic: bool = True
    max_consecutive_skips: int = 50

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            _require(is_number(value), name, value, "a number")
            value = value if isinstance(value, int) else float(value)  # one too large for a float is out of range
            _require(FLOAT32_TINY <= value <= FLOAT32_MAX, name, value, "a positive finite float32")
            object.__setattr__(self, name, float(value))
        for name in ("growth_interval", "hysteresis", "max_consecutive_skips"):
            value = getattr(self, name)
            _require(isinstance(value, Integral) and not isinstance(value, bool), name, value, "an integer")
            _require(1 <= value < 2**31, name, value, "an integer from 1 to 2**31 - 1")
            object.__setattr__(self, name, int(value))
        _require(isinstance(self.dynamic, bool), "dynamic", self.dynamic, "True or False")
        _require(self.growth_factor >= 1, "growth_factor", self.growth_factor, "at least 1")
        _require(self.backoff_factor <= 1, "backoff_factor", self.backoff_factor, "at most 1")
        if self.dynamic:
            bounds = f"between min_scale={self.min_scale:g} and max_scale={self.max_scale:g}"
            _require(self.min_scale <= self.init_scale <= self.max_scale, "init_scale", self.init_scale, bounds)

    @classmethod
    def static(cls, scale: float) -> LossScale:
        """Return a loss scale that never moves; steps that are not finite are still skipped."""
        return cls(init_scale=scale, dynamic=False)

    @classmethod
    def parse(cls, value: object) -> LossScale:
        """Read the `loss_scale` argument of the public functions.

        Args:
            value: `"dynamic"`, a positive number (static scale), or a `LossScale`.

        Raises:
            InvalidOptionError: It is none of these.
        """
        if isinstance(value, LossScale):
            return value
        if isinstance(value, str) and value == "dynamic":
            return cls()
        if is_number(value):
            return cls.static(value)
        raise InvalidOptionError(
            f"loss_scale={shown(value)} is not a loss scale; accepted: 'dynamic', a positive number (static), or "
            f"ampx.LossScale(...). Pass one of these, or leave it out for the default of dtype and level."
        )

    def initial_state(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState(round_to_float32(self.init_scale), 0, self.hysteresis, 0)


@dataclass(frozen=True)
class LossScaleState:
    """Where a loss scale stands.

    Attributes:
        scale: Factor for the next loss. Python float, or a float32 scalar tensor where traced.
        growth_tracker: Finite steps since the scale last changed or overflowed. Integer scalar.
        hysteresis_tracker: Overflows still tolerated before backoff. Integer scalar.
        consecutive_skips: Overflows in a row up to now. Integer scalar.
    """

    scale: Scalar
    growth_tracker: Scalar
    hysteresis_tracker: Scalar
    consecutive_skips: Scalar


def is_one(config: LossScale) -> bool:
    """Return whether a loss scale is always 1, so that nothing is multiplied or divided."""
    return not config.dynamic and config.init_scale == 1.0


def _choose(condition: Scalar, if_true: Scalar, if_false: Scalar) -> Scalar:
    return if_true if condition else if_false


def next_state(config: LossScale, state: LossScaleState, finite: Scalar, where: Where = _choose) -> LossScaleState:
    """Return the state after one counted step.

    It moves by these rules::

        finite:      growth_tracker += 1; consecutive_skips = 0; hysteresis refilled
                     if growth_tracker >= growth_interval: scale = min(scale * growth_factor, max_scale)
                                                           growth_tracker = 0
        not finite:  growth_tracker = 0; consecutive_skips += 1; hysteresis_tracker -= 1
                     if hysteresis_tracker <= 0: scale = max(scale * backoff_factor, min_scale); hysteresis refilled

    The product of two float32 numbers is exact in float64, so rounding it once gives what a device
    computes in float32: traces agree bit for bit.

    Args:
        config: The configuration.
        state: The state before the step.
        finite: Whether all gradients were finite. Python bool, or a boolean scalar tensor.
        where: `where(condition, if_true, if_false)`; Python's conditional expression by default, a
            framework's `where` for tensors and traced code.

    Returns:
        The new state, of the same kinds of values.

    Sync: where `where` does.

    Example:
        >>> state = ampx.next_state(ampx.LossScale(), ampx.LossScale().initial_state(), finite=False)
    """
    tracker = state.growth_tracker + 1
    growing = tracker >= config.growth_interval
    if finite is True and growing is False and config.dynamic:  # nearly every step on a host: nothing is chosen
        return LossScaleState(state.scale, tracker, config.hysteresis, 0)
    skips = where(finite, 0, state.consecutive_skips + 1)
    if not config.dynamic:
        return state if skips is state.consecutive_skips else replace(state, consecutive_skips=skips)
    grown = state.scale * round_to_float32(config.growth_factor)
    grown = where(grown > config.max_scale, config.max_scale, grown)
    remaining = state.hysteresis_tracker - 1
    backing_off = remaining <= 0
    backed_off = state.scale * round_to_float32(config.backoff_factor)
    backed_off = where(backed_off < config.min_scale, config.min_scale, backed_off)
    scale = where(
        finite,
        where(growing, grown, state.scale),
        where(backing_off, backed_off, state.scale),
    )
    return LossScaleState(
        scale=round_to_float32(scale) if isinstance(scale, float) else scale,
        growth_tracker=where(finite, where(growing, 0, tracker), 0),
        hysteresis_tracker=where(finite, config.hysteresis, where(backing_off, config.hysteresis, remaining)),
        consecutive_skips=skips,
    )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether this is a real number of Python or NumPy, and not NaN."""
    # x == x: false for NaN only, and unlike math.isnan at ease with integers too large for a float.
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def _require(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise InvalidOptionError(
            f"LossScale({name}={shown(value)}) is out of range; accepted: {accepted}. Change {name}."
        )
