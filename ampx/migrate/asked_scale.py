"""Where a script asks its scaler for the present scale."""

from __future__ import annotations

import libcst as cst

from .backwards import Backwards, Scaler
from .plan import Plan


def refuse_between_step_and_update(plan: Plan, scaler: Scaler, call: cst.Call) -> None:
    """Refuse to tell the scale where the script's has not moved yet, and that of ampx has.

    Scripts compare it with the scale after `update`, to hold their scheduler back when a step was skipped.

    Raises:
        NeedsHumanError: The call stands between a step and its update.
    """
    source = plan.source
    home, here = source.function(call), source.order(call)
    moves = [source.order(one) - here for one in scaler.updates if source.function(one) is home]
    steps = [source.order(one) - here for one, _ in scaler.steps if source.function(one) is home]
    last = max((one for one in moves if one < 0), default=-here)
    if any(last < one < 0 for one in steps) and any(one > 0 for one in moves):
        raise plan.block(
            call,
            f"`{source.code(call)}` asks for the scale between `step` and `update`; ampx moves it in `step`",
            "Ask for it before the first step, which tells the same, and migrate again.",
        )


def write_scale(plan: Plan, backwards: Backwards, scaler: Scaler, call: cst.Call) -> str:
    """Write the present scale; a scaler that is switched off gives 1, whatever it was configured with."""
    scale = f"{backwards.visible(scaler, call)[0]}.loss_scale"
    if not ("loss_scale=" in scaler.init and "enabled=" in scaler.init):
        return scale
    holder = plan.source.code(cst.ensure_type(call.func, cst.Attribute).value)
    return f"({scale} if {holder}.enabled else 1.0)"
