"""What a session really does."""

from __future__ import annotations

from dataclasses import dataclass

from .policy import Dtype, Policy
from .scale_state import LossScale


@dataclass(frozen=True)
class Effective:
    """What a session really does, and why.

    Attributes:
        framework: Name of the framework.
        device: Name of the device whose computation is cast.
        dtype: Compute dtype; None where mixed precision is off.
        level: Opt level.
        policy: Dtypes of parameters, computation and outputs.
        loss_scale: Default configuration for wrapped optimizers.
        native: The device computes the dtype in hardware.
        process_wide: Casting is on outside `autocast` regions too.
        enabled: False: every call is transparent.
        reason: Why, in one sentence.
    """

    framework: str
    device: str
    dtype: Dtype | None
    level: str
    policy: Policy
    loss_scale: LossScale
    native: bool
    process_wide: bool
    enabled: bool
    reason: str
