"""The dialect of TensorFlow: the graph rewrite of TensorFlow 1, and the LossScaleOptimizer of Keras 2.

Keras' dtype policies stay as they are: the session has level O0 and only scales losses.
"""

from __future__ import annotations

from typing import Final

import libcst as cst

from .flow import is_none
from .numbers import loss_scale, number
from .plan import Plan
from .source import arguments

ROOTS: Final = ("tensorflow", "keras", "tf_keras")
_REWRITES: Final = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
_NEW: Final = ("inner_optimizer", "dynamic", "initial_scale", "dynamic_growth_steps")
_OLD: Final = ("optimizer", "loss_scale")
_FORMER_INIT_SCALE: Final = "2.0**15"
_POLICIES: Final = {"set_global_policy", "set_dtype_policy", "global_policy", "dtype_policy", "Policy", "DTypePolicy"}
_BY_HAND: Final = "Rewrite this file by hand, or call `ampx_tensorflow.install()`, with which it runs as it is."
_KEPT: Final = "Keras' dtype policies work beside ampx: nothing has to be done."


class TensorFlowAmp:
    """Plans the edits of one file."""

    def __init__(self, plan: Plan) -> None:
        """Take the file."""
        self._plan = plan
        self._source = plan.source
        self._optimizers: list[cst.Call] = []

    def rewrite(self) -> None:
        """Plan everything.

        Raises:
            NeedsHumanError: Something is not fully understood.
        """
        for node, name in list(self._source.references()):
            parts = name.split(".")
            if parts[0] not in ROOTS:
                continue
            parent = self._source.parent(node)
            call = parent if isinstance(parent, cst.Call) and parent.func is node else None
            if parts[-1] in _REWRITES:
                self._plan.expression(node, f"ampx_tensorflow.{parts[-1]}")
                self._plan.imports["ampx_tensorflow"] = ""
            elif "mixed_precision" in parts[:-1]:
                self._mixed_precision(node, call, parts)
        self._begin()

    def _mixed_precision(self, node: cst.CSTNode, call: cst.Call | None, parts: list[str]) -> None:
        name, old = parts[-1], "experimental" in parts
        if name == "LossScaleOptimizer" and call is not None:
            self._wrap(call, old)
        elif name in ("set_policy", "Policy") and old:
            self._policy(node, call, name)
        elif name in _POLICIES or name == "LossScaleOptimizer":
            self._plan.tell(node, "note", f"`{self._source.code(node)}` stays", _KEPT)
        else:
            raise self._plan.block(node, f"`{self._source.code(node)}` has no counterpart that is known", _BY_HAND)

    def _policy(self, node: cst.CSTNode, call: cst.Call | None, name: str) -> None:
        found = None if call is None else arguments(call, ("name", "loss_scale") if name == "Policy" else ("policy",))
        if found is None or "loss_scale" in found or not isinstance(node, cst.Attribute):
            raise self._plan.block(
                node,
                f"`{self._source.code(node)}` is gone from Keras",
                "Set a policy by `set_global_policy`, and pass the loss scale to `ampx.wrap_optimizer`.",
            )
        module = node.value
        if not isinstance(module, cst.Attribute) or module.attr.value != "experimental":
            raise self._plan.block(node, f"`{self._source.code(node)}` is gone from Keras", _BY_HAND)
        kept = self._source.code(module.value)
        self._plan.expression(node, f"{kept}.{'Policy' if name == 'Policy' else 'set_global_policy'}")

    def _wrap(self, call: cst.Call, old: bool) -> None:
        names = _OLD if old else _NEW
        found = arguments(call, names)
        inner = None if found is None else found.get(names[0])
        if found is None or inner is None or not found.keys() <= set(names):
            raise self._plan.block(call, "`LossScaleOptimizer` with arguments that cannot be read", _BY_HAND)
        scale = self._old_scale(call, found) if old else self._scale(call, found)

        def write(updated: cst.Call) -> cst.BaseExpression:
            made = arguments(updated, names) or {}
            return self._plan.parse_expression(
                f"ampx.wrap_optimizer({self._plan.code(made[names[0]])}, loss_scale={scale})"
            )

        self._plan.edit(call, write)
        self._optimizers.append(call)

    def _scale(self, call: cst.Call, found: dict[str, cst.BaseExpression]) -> str:
        code = {name: self._source.code(value) for name, value in found.items() if not is_none(value)}
        first = code.get("initial_scale", _FORMER_INIT_SCALE)
        dynamic = code.get("dynamic", "True")
        if dynamic == "False" and "initial_scale" in code:
            return first
        if dynamic != "True":
            raise self._plan.block(call, f"`dynamic={dynamic}` is decided at run time", _BY_HAND)
        settings = {"init_scale": first}
        if "dynamic_growth_steps" in code:
            settings["growth_interval"] = code["dynamic_growth_steps"]
        return loss_scale(settings)

    def _old_scale(self, call: cst.Call, found: dict[str, cst.BaseExpression]) -> str:
        value = found.get("loss_scale")
        text = "" if value is None else self._source.code(value).strip("\"'")
        if text == "dynamic":
            return loss_scale({"init_scale": _FORMER_INIT_SCALE})
        if number(text) is None:
            raise self._plan.block(call, "a loss scale that cannot be read", _BY_HAND)
        return text

    def _begin(self) -> None:
        """Start the session before the first optimizer is wrapped."""
        if not self._optimizers:
            return
        first = self._source.statement(self._optimizers[0])
        block = self._source.block(first)
        for call in self._optimizers:
            same = self._source.function(call) is self._source.function(first)
            if not same or not (block is self._source.module or self._source.inside(call, block)):
                raise self._plan.block(call, "optimizers are wrapped in several places", _BY_HAND)
        if self._source.loops(first):
            raise self._plan.block(self._optimizers[0], "an optimizer is wrapped in a loop", _BY_HAND)
        self._plan.insert_before(first, 'ampx.init("tensorflow", level="O0", loss_scale="dynamic")')
