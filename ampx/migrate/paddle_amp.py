"""The dialect of `paddle.amp` in eager mode: its `GradScaler`. Its `auto_cast` regions stay."""

from __future__ import annotations

from typing import Final

import libcst as cst

from .flow import Flow
from .numbers import loss_scale
from .plan import Plan
from .scalers import ScalerRewriter
from .source import arguments, as_bool

ROOTS: Final = ("paddle.amp",)
_SCALERS: Final = frozenset({"paddle.amp.GradScaler", "paddle.amp.grad_scaler.GradScaler"})
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


class PaddleAmp:
    """Plans the edits of one file."""

    def __init__(self, plan: Plan) -> None:
        """Take the file."""
        self._plan = plan
        self._source = plan.source

    def rewrite(self) -> None:
        """Plan everything.

        Raises:
            NeedsHumanError: Something is not fully understood.
        """
        scalers = ScalerRewriter(self._plan, Flow(self._source), _SCALERS, self._init).rewrite()
        if len(scalers) > 1:
            raise self._plan.block(
                scalers[1].call,
                "a second scaler; a process has one session of ampx for Paddle",
                "Make one session, and wrap each optimizer with a `loss_scale` of its own.",
            )
        for node, name in self._source.references():
            if name.startswith("paddle.amp.") and node not in self._plan.claimed:
                self._plan.tell(node, "note", f"`{self._source.code(node)}` stays", _KEPT)

    def _init(self, call: cst.Call) -> str:
        """Write the call of `ampx.init`: level O0, since casting stays with `auto_cast`."""
        found = arguments(call, tuple(_ARGUMENTS))
        if found is None or not found.keys() <= _ARGUMENTS.keys():
            raise self._plan.block(call, "a scaler with arguments that cannot be read", _BY_HAND)
        code = {name: self._source.code(value) for name, value in found.items()}
        dynamic = code.pop("use_dynamic_loss_scaling", "True")
        enabled = code.pop("enable", "True")
        settings = {field: code[name] for name, field in _ARGUMENTS.items() if field is not None and name in code}
        if dynamic == "True":
            scale = loss_scale(settings) if settings else '"dynamic"'
        elif dynamic == "False":
            scale = settings.get("init_scale", "65536.0")
        else:
            raise self._plan.block(call, f"`use_dynamic_loss_scaling={dynamic}` is decided at run time", _BY_HAND)
        options = ['"paddle"', 'level="O0"', f"loss_scale={scale}", 'nan_loss="skip"']
        if enabled != "True":
            options.append(f"enabled={as_bool(enabled)}")
        return self._plan.written(call, "ampx.init", options)
