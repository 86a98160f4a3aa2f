"""Loss-scale dictionaries as other libraries save them, with what they mean."""

from __future__ import annotations

from typing import Any, Final


def _state(scale: float, growth_tracker: int, hysteresis_tracker: int = 1) -> dict[str, Any]:
    return {
        "scale": scale,
        "growth_tracker": growth_tracker,
        "hysteresis_tracker": hysteresis_tracker,
        "consecutive_skips": 0,
    }


# By library: the dictionary, the fields of the configuration that it decides, and the state that it stands for.
FOREIGN: Final[dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "apex": (
        {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 1999}},
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "hysteresis": 1},
        _state(4096.0, 1999),
    ),
    "torch": (
        {"scale": 512.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 4, "_growth_tracker": 3},
        {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 4, "hysteresis": 1},
        _state(512.0, 3),
    ),
    "paddle": (
        {
            "scale": [2048.0],
            "incr_ratio": 2.0,
            "decr_ratio": 0.5,
            "incr_every_n_steps": 3,
            "decr_every_n_nan_or_inf": 2,
            "incr_count": 0,
            "decr_count": 1,
            "use_dynamic_loss_scaling": True,
        },
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "hysteresis": 2},
        _state(2048.0, 0, 1),
    ),
    "keras": (
        {"dynamic_scale": 1024.0, "step_counter": 4, "dynamic_growth_steps": 5},
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5},
        _state(1024.0, 4),
    ),
    "tensorflow": (
        {"current_loss_scale": 128.0, "good_steps": 1, "increment_period": 3, "multiplier": 4.0},
        {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3},
        _state(128.0, 1),
    ),
    # flax grows one finite step late.
    "flax": (
        {"scale": 256.0, "fin_steps": 2, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2},
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3},
        _state(256.0, 2),
    ),
    # DeepSpeed grows one finite step late.
    "deepspeed": (
        {
            "cur_scale": 8192.0,
            "cur_iter": 10,
            "last_overflow_iter": 7,
            "scale_factor": 2.0,
            "scale_window": 4,
            "delayed_shift": 3,
            "cur_hysteresis": 2,
        },
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "hysteresis": 3},
        _state(8192.0, 2, 2),
    ),
}
