"""The dialect of TensorFlow: the graph rewrite of TensorFlow 1, and the LossScaleOptimizer of Keras 2.

Keras' dtype policies stay as they are: the session has level O0 and only scales losses.
"""

from __future__ import annotations

import ast
from typing import Final

from ampx.syntax.program import Reference, arguments, is_none

from .edits import Plan
from .numbers import loss_scale, number
from .report import NeedsHumanError

ROOTS: Final = ("tensorflow", "keras", "tf_keras")
REWRITES: Final = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
# Of Keras 2, under mixed_precision, and of Keras 3, under optimizers; Keras 3 has its own under both names.
_NEW: Final = ("inner_optimizer", "dynamic", "initial_scale", "dynamic_growth_steps")
_KERAS_3: Final = ("inner_optimizer", "initial_scale", "dynamic_growth_steps", "name")
_OLD: Final = ("optimizer", "loss_scale")
_FORMER_INIT_SCALE: Final = "2.0**15"
_POLICIES: Final = {"set_global_policy", "set_dtype_policy", "global_policy", "dtype_policy", "Policy", "DTypePolicy"}
_BY_HAND: Final = "Rewrite this file by hand, or call `ampx_tensorflow.install()`, with which it runs as it is."
_KEPT: Final = "Keras' dtype policies work beside ampx: nothing has to be done."


class TensorFlowAmp:
    """Plans the edits of one program."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._program = plan.program
        self._optimizers: list[ast.Call] = []

    def rewrite(self) -> None:
        """Plan everything."""
        for node, name in self._program.references():
            parts = name.split(".")
            if parts[0] not in ROOTS:
                continue
            call = self._program.call_of(node)
            if parts[-1] in REWRITES:
                self._plan.of(node).expression(node, f"ampx_tensorflow.{parts[-1]}")
                self._plan.of(node).imports["ampx_tensorflow"] = ""
            elif parts[-2:] == ["optimizers", "LossScaleOptimizer"] and call is not None:
                self._wrap(call, _KERAS_3)
            elif "mixed_precision" in parts[:-1]:
                self._mixed_precision(node, call, parts)
        self._begin()

    def _mixed_precision(self, node: Reference, call: ast.Call | None, parts: list[str]) -> None:
        name, old = parts[-1], "experimental" in parts
        if name == "LossScaleOptimizer" and call is not None:
            self._wrap(call, _OLD if old else _NEW)
        elif name in ("set_policy", "Policy") and old:
            self._policy(node, call, name)
        elif name in _POLICIES or name == "LossScaleOptimizer":
            self._plan.of(node).tell(node, "note", f"`{self._program.code(node)}` stays", _KEPT)
        else:
            raise NeedsHumanError(node, f"`{self._program.code(node)}` has no counterpart that is known", _BY_HAND)

    def _policy(self, node: Reference, call: ast.Call | None, name: str) -> None:
        values = None if call is None else arguments(call, ("name", "loss_scale") if name == "Policy" else ("policy",))
        if values is None or "loss_scale" in values or not isinstance(node, ast.Attribute):
            raise NeedsHumanError(
                node,
                f"`{self._program.code(node)}` is gone from Keras",
                "Set a policy by `set_global_policy`, and pass the loss scale to `ampx.wrap_optimizer`.",
            )
        module = node.value
        if not isinstance(module, ast.Attribute) or module.attr != "experimental":
            raise NeedsHumanError(node, f"`{self._program.code(node)}` is gone from Keras", _BY_HAND)
        kept = self._program.code(module.value)
        self._plan.of(node).expression(node, f"{kept}.{'Policy' if name == 'Policy' else 'set_global_policy'}")

    def _wrap(self, call: ast.Call, names: tuple[str, ...]) -> None:
        values = arguments(call, names, *_NEW)
        inner = None if values is None else values.get(names[0])
        unclear = names is _NEW and len(call.args) > 1
        if values is None or inner is None or unclear:
            raise NeedsHumanError(call, "`LossScaleOptimizer` with arguments that cannot be read", _BY_HAND)
        edits = self._plan.of(call)
        scale = self._old_scale(call, values) if names is _OLD else self._scale(call, values)

        def write() -> str:
            return edits.written(call, "ampx.wrap_optimizer", [edits.code(inner), f"loss_scale={scale}"])

        edits.expression(call, write)
        self._optimizers.append(call)

    def _scale(self, call: ast.Call, values: dict[str, ast.expr]) -> str:
        code = {name: self._program.code(value) for name, value in values.items() if not is_none(value)}
        first = code.get("initial_scale", _FORMER_INIT_SCALE)
        dynamic = code.get("dynamic", "True")
        if dynamic == "False" and "initial_scale" in code:
            return first
        if dynamic != "True":
            raise NeedsHumanError(call, f"`dynamic={dynamic}` is decided at run time", _BY_HAND)
        settings = {"init_scale": first}
        if "dynamic_growth_steps" in code:
            settings["growth_interval"] = code["dynamic_growth_steps"]
        return loss_scale(settings)

    def _old_scale(self, call: ast.Call, values: dict[str, ast.expr]) -> str:
        value = values.get("loss_scale")
        text = "" if value is None else self._program.code(value).strip("\"'")
        if text == "dynamic":
            return loss_scale({"init_scale": _FORMER_INIT_SCALE})
        if number(text) is None:
            raise NeedsHumanError(call, "a loss scale that cannot be read", _BY_HAND)
        return text

    def _begin(self) -> None:
        """Start the session before the first optimizer is wrapped."""
        if not self._optimizers:
            return
        program = self._program
        first = program.statement(self._optimizers[0])
        block = program.block(first)
        for call in self._optimizers:
            same = program.function(call) is program.function(first) and program.module(call) is program.module(first)
            if not same or not any(program.inside(call, statement) for statement in block):
                raise NeedsHumanError(call, "optimizers are wrapped in several places", _BY_HAND)
        if program.loops(first):
            raise NeedsHumanError(self._optimizers[0], "an optimizer is wrapped in a loop", _BY_HAND)
        self._plan.of(first).insert_before(first, 'ampx.init("tensorflow", level="O0", loss_scale="dynamic")')
