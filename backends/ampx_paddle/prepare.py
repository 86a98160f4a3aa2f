"""What `prepare` does: Paddle's `decorate` at O2."""

from __future__ import annotations

from typing import Any

import paddle

from ampx.backend import CastPlan
from ampx.errors import UnsupportedDeviceError
from ampx.numerics.watching import Names, module_dtypes

from .calls import named
from .step import AmpOptimizer


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Cast a model to low precision, norms excepted, and make float32 masters for its optimizer; at O1 do nothing."""
    Names(model, named).check(module_dtypes(plan), "prepare")
    if plan.level == "O2":
        present = paddle.device.get_device()
        if present.partition(":")[0] != plan.device.partition(":")[0]:
            raise UnsupportedDeviceError(
                f"prepare was called at level='O2' for {plan.device!r} while paddle computes on {present!r}, where "
                f"decorate silently does nothing; accepted: the session's device. Call "
                f"paddle.set_device({plan.device!r}) before making the model."
            )
        raw = optimizer.optimizer if isinstance(optimizer, AmpOptimizer) else optimizer
        decorated = paddle.amp.decorate(
            models=model, optimizers=raw, level="O2", dtype=plan.dtype, master_weight=None if raw is None else True
        )
        model = decorated if raw is None else decorated[0]
    return model if optimizer is None else (model, optimizer)
