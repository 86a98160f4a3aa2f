"""The dialect of `mxnet.contrib.amp`, which MXNet 2 calls `mxnet.amp`."""

from __future__ import annotations

from typing import Final

import libcst as cst

from .flow import Flow, is_none
from .plan import Plan
from .source import arguments

ROOTS: Final = ("mxnet.contrib.amp", "mxnet.amp")
_INIT: Final = ("target_dtype", "target_precision_ops", "conditional_fp32_ops", "fp32_ops", "layout_optimization")
_COMPAT: Final = "# noqa: F401 -- before mxnet, which needs two names that NumPy 1.24 took away"
_BY_HAND: Final = "Rewrite this file by hand, or call `ampx_mxnet.amp.install()`, with which it runs as it is."


class MXNetAmp:
    """Plans the edits of one file."""

    def __init__(self, plan: Plan) -> None:
        """Read the file's assignments."""
        self._plan = plan
        self._source = plan.source
        self._flow = Flow(plan.source)

    def rewrite(self) -> None:
        """Plan everything.

        Raises:
            NeedsHumanError: Something is not fully understood.
        """
        for node, name in list(self._source.references()):
            root = next((one for one in ROOTS if name == one or name.startswith(f"{one}.")), None)
            if root is None:
                continue
            verb = name.removeprefix(root).removeprefix(".")
            parent = self._source.parent(node)
            call = parent if isinstance(parent, cst.Call) and parent.func is node else None
            if verb == "init" and call is not None:
                self._init(call)
            elif verb == "init_trainer" and call is not None and len(call.args) == 1:
                self._init_trainer(call)
            elif verb in ("scale_loss", "unscale"):
                self._plan.expression(node, f"ampx.{verb}")
            elif verb.startswith(("convert_", "list_")):
                self._plan.expression(node, f"ampx_mxnet.amp.{verb}")
                self._plan.imports["ampx_mxnet.amp"] = ""
            else:
                raise self._plan.block(node, f"`{self._source.code(node)}` has no counterpart that is known", _BY_HAND)
        if self._plan.changes:
            self._plan.imports["ampx_mxnet.compat"] = _COMPAT

    def _init(self, call: cst.Call) -> None:
        found = arguments(call, _INIT)
        if found is None or not found.keys() <= set(_INIT):
            raise self._plan.block(call, "`amp.init` with arguments that cannot be read", _BY_HAND)
        for name in ("target_precision_ops", "conditional_fp32_ops", "fp32_ops"):
            if name in found and not is_none(found[name]):
                raise self._plan.block(
                    call, f"`{name}` takes the place of MXNet's own list", "Pass `allow` and `deny` to `ampx.init`."
                )
        options = ['"mxnet"']
        if "target_dtype" in found:
            options.append(f"dtype={self._source.code(found['target_dtype'])}")
        options.append('loss_scale="dynamic"')
        self._plan.expression(call, f"ampx.init({', '.join(options)})")

    def _init_trainer(self, call: cst.Call) -> None:
        trainer = call.args[0].value
        name = self._source.code(trainer)
        if self._is_only_held_here(call, trainer):
            self._plan.statement(call, lambda _: f"{name} = ampx.wrap_optimizer({name})")
        else:  # whoever else holds the trainer goes on with it
            self._plan.expression(call, f"ampx.wrap_optimizer({name}, in_place=True)")

    def _is_only_held_here(self, call: cst.Call, trainer: cst.BaseExpression) -> bool:
        """Tell whether nobody saw the trainer between its making and this call."""
        place = self._flow.place(trainer)
        if not isinstance(trainer, cst.Name) or place is None:
            return False
        bindings, uses = self._flow.bindings.get(place, []), self._flow.uses.get(place, [])
        if len(bindings) != 1 or isinstance(bindings[0].node, cst.Param):
            return False
        if self._source.function(bindings[0].node) is not self._source.function(call):
            return False
        return all(one is trainer or self._source.order(one) > self._source.order(call) for one in uses)
