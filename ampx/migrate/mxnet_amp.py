"""The dialect of `mxnet.contrib.amp`, which MXNet 2 calls `mxnet.amp`."""

from __future__ import annotations

import ast
from typing import Final

from ampx.syntax.program import Reference, arguments, is_none

from .edits import Plan
from .report import NeedsHumanError

ROOTS: Final = ("mxnet.contrib.amp", "mxnet.amp")
_INIT: Final = ("target_dtype", "target_precision_ops", "conditional_fp32_ops", "fp32_ops", "layout_optimization")
_COMPAT: Final = "# noqa: F401 -- before mxnet, which needs two names that NumPy 1.24 took away"
_BY_HAND: Final = "Rewrite this file by hand, or call `ampx_mxnet.amp.install()`, with which it runs as it is."


class MXNetAmp:
    """Plans the edits of one program."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._program = plan.program

    def rewrite(self) -> None:
        """Plan everything."""
        for node, name in self._program.references():
            root = next((root for root in ROOTS if f"{name}.".startswith(f"{root}.")), None)
            if root is None:
                continue
            self._replace(node, name.removeprefix(root).removeprefix("."))
            self._plan.of(node).imports["ampx_mxnet.compat"] = _COMPAT

    def _replace(self, node: Reference, verb: str) -> None:
        """Plan what takes the place of a name of the old module."""
        edits, call = self._plan.of(node), self._program.call_of(node)
        if verb.startswith(("convert_", "list_")):
            edits.expression(node, f"ampx_mxnet.amp.{verb}")
            edits.imports["ampx_mxnet.amp"] = ""
        elif verb == "init" and call is not None:
            self._init(call)
        elif verb == "init_trainer" and call is not None and len(call.args) == 1 and not call.keywords:
            self._init_trainer(call)
        elif verb in ("scale_loss", "unscale") and call is not None:
            edits.expression(node, f"ampx.{verb}")
        else:
            what = f"`{self._program.code(node)}` has no counterpart that is known"
            raise NeedsHumanError(node, what, _BY_HAND)

    def _init(self, call: ast.Call) -> None:
        values = arguments(call, _INIT)
        if values is None:
            raise NeedsHumanError(call, "`amp.init` with arguments that cannot be read", _BY_HAND)
        for name in ("target_precision_ops", "conditional_fp32_ops", "fp32_ops"):
            if name in values and not is_none(values[name]):
                raise NeedsHumanError(
                    call, f"`{name}` takes the place of MXNet's own list", "Pass `allow` and `deny` to `ampx.init`."
                )
        options = ['"mxnet"']
        if "target_dtype" in values:
            options.append(f"dtype={self._program.code(values['target_dtype'])}")
        options.append('loss_scale="dynamic"')
        self._plan.of(call).expression(call, f"ampx.init({', '.join(options)})")

    def _init_trainer(self, call: ast.Call) -> None:
        edits, trainer = self._plan.of(call), call.args[0]
        name = self._program.code(trainer)
        if self._is_only_held_here(call, trainer):
            edits.statement(call, lambda: f"{name} = ampx.wrap_optimizer({name})")
        else:  # whoever else holds the trainer goes on with it
            edits.expression(call, f"ampx.wrap_optimizer({name}, in_place=True)")

    def _is_only_held_here(self, call: ast.Call, trainer: ast.expr) -> bool:
        """Return whether the trainer is not used between its making and this call."""
        place = self._plan.flow.place(trainer)
        if not isinstance(trainer, ast.Name) or place is None or not isinstance(self._program.parent(call), ast.Expr):
            return False
        bindings, uses = self._plan.flow.bindings_at(place), self._plan.flow.uses_at(place)
        if len(bindings) != 1 or isinstance(bindings[0].node, ast.arg):
            return False
        if self._program.function(bindings[0].node) is not self._program.function(call):
            return False
        return all(use is trainer or self._program.order(use) > self._program.order(call) for use in uses)
