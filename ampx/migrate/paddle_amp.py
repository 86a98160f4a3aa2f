"""The dialect of `paddle.amp` in eager mode: its `GradScaler`. Its `auto_cast` regions stay."""

from __future__ import annotations

import ast
from typing import Final

from ampx.syntax.program import arguments

from .edits import Plan
from .grad_scaler import ScalerRewriter
from .numbers import as_bool, loss_scale
from .report import NeedsHumanError

ROOTS: Final = ("paddle.amp",)
SCALERS: Final = frozenset({"paddle.amp.GradScaler", "paddle.amp.grad_scaler.GradScaler"})
_ARGUMENTS: Final = {
    "enable": None,
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
    "decr_every_n_nan_or_inf": "hysteresis",
    "use_dynamic_loss_scaling": None,
}
_BY_HAND: Final = "Write `ampx.init` by hand: the manual's page on PaddlePaddle shows how."
_KEPT: Final = "It is Paddle's own and works beside ampx: nothing has to be done."


def rewrite(plan: Plan) -> None:
    """Plan everything."""
    ScalerRewriter(plan, "Paddle", SCALERS, lambda call: _init(plan, call)).rewrite()
    for node, name in plan.program.references():
        edits = plan.of(node)
        if name.startswith("paddle.amp.") and node not in edits.claimed:
            edits.tell(node, "note", f"`{plan.program.code(node)}` stays", _KEPT)


def _init(plan: Plan, call: ast.Call) -> str:
    """Write the call of `ampx.init`: level O0, since casting stays with `auto_cast`."""
    values = arguments(call, _ARGUMENTS)
    if values is None:
        raise NeedsHumanError(call, "a scaler with arguments that cannot be read", _BY_HAND)
    code = {name: plan.program.code(value) for name, value in values.items()}
    dynamic = code.pop("use_dynamic_loss_scaling", "True")
    enabled = code.pop("enable", "True")
    settings = {field: code[name] for name, field in _ARGUMENTS.items() if field is not None and name in code}
    if dynamic == "True":
        scale = loss_scale(settings) if settings else '"dynamic"'
    elif dynamic == "False":
        scale = settings.get("init_scale", "65536.0")
    else:
        raise NeedsHumanError(call, f"`use_dynamic_loss_scaling={dynamic}` is decided at run time", _BY_HAND)
    options = ['"paddle"', 'level="O0"', f"loss_scale={scale}", 'nan_loss="skip"']
    if enabled != "True":
        options.append(f"enabled={as_bool(enabled)}")
    return plan.of(call).written(call, "ampx.init", options)
