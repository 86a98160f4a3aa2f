"""The dialect of `apex.amp`."""

from __future__ import annotations

from typing import Final

import libcst as cst

from .apex_gradients import GradientReaders
from .flow import Flow, is_none
from .numbers import loss_scale, number
from .plan import Plan
from .source import arguments, as_bool, dotted

ROOTS: Final = ("apex",)
_AMP: Final = "apex.amp."
_INITIALIZE: Final = (
    "models",
    "optimizers",
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
    "num_losses",
    "verbosity",
    "min_loss_scale",
    "max_loss_scale",
)
_SCALE_LOSS: Final = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
_SAME_NAME: Final = {"half_function", "float_function", "promote_function", "state_dict"}
_REGISTER: Final = {
    "register_half_function": "half_function",
    "register_float_function": "float_function",
    "register_promote_function": "promote_function",
}
_PROPERTIES: Final = ("cast_model_type", "patch_torch_functions", "master_weights", "cast_model_outputs")
_ELSEWHERE: Final = {
    "apex.parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel takes its place.",
    "apex.parallel.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm takes its place.",
    "apex.parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm takes its place.",
    "apex.optimizers.FusedAdam": "torch.optim.AdamW(..., fused=True) takes its place.",
    "apex.optimizers.FusedSGD": "torch.optim.SGD(..., fused=True) takes its place.",
    "apex.normalization.FusedLayerNorm": "torch.nn.LayerNorm takes its place.",
}
_TESTS: Final = (cst.Comparison, cst.ComparisonTarget, cst.BooleanOperation, cst.UnaryOperation, cst.If, cst.IfExp)
_BY_HAND: Final = "Rewrite this file by hand: the manual's page on apex shows the counterparts."


class ApexAmp:
    """Plans the edits of one file."""

    def __init__(self, plan: Plan) -> None:
        """Read the file's assignments and calls."""
        self._plan = plan
        self._source = plan.source
        self._flow = Flow(plan.source)
        self._renamed: set[cst.CSTNode] = set()
        self._told: set[str] = set()

    def rewrite(self) -> None:
        """Plan everything.

        Raises:
            NeedsHumanError: Something is not fully understood.
        """
        scaled: list[tuple[cst.With, str]] = []
        masters: list[cst.Call] = []
        for node, name in list(self._source.references()):
            if not name.startswith("apex."):
                continue
            if name == "apex.amp":
                self._module(node)
                continue
            if not name.startswith(_AMP):
                self._elsewhere(node, name)
                continue
            verb = name.removeprefix(_AMP)
            call = self._source.parent(node)
            called = call if isinstance(call, cst.Call) and call.func is node else None
            if verb == "initialize" and called is not None:
                self._initialize(called)
            elif verb == "scale_loss" and called is not None:
                scaled.append(self._scale_loss(called))
            elif verb == "master_params" and called is not None and len(called.args) == 1:
                masters.append(called)
            elif verb == "disable_casts" and called is not None and not called.args:
                self._plan.expression(called, "ampx.autocast(enabled=False)")
            elif verb == "load_state_dict" and called is not None and len(called.args) == 1:
                self._load(called)
            elif verb in _SAME_NAME:
                self._plan.expression(node, f"ampx.{verb}")
            elif verb in _REGISTER and called is not None:
                self._register(called, _REGISTER[verb])
            else:
                raise self._plan.block(node, f"`{self._source.code(node)}` has no counterpart that is known", _BY_HAND)
        GradientReaders(self._plan, self._flow, scaled).rewrite(masters)

    def _module(self, node: cst.CSTNode) -> None:
        """Rename the module where a script asks whether it is there, and where it says that it is not."""
        if not isinstance(node, cst.Name) or not isinstance(self._source.parent(node), _TESTS):
            raise self._plan.block(node, "the module `apex.amp` is used as a value", _BY_HAND)
        self._plan.expression(node, "ampx")
        for assignment in self._source.every(cst.Assign):
            target = assignment.targets[0].target
            renamed = isinstance(target, cst.Name) and target.value == node.value and target not in self._renamed
            if renamed and is_none(assignment.value):
                self._renamed.add(target)
                self._plan.expression(target, "ampx")

    def _elsewhere(self, node: cst.CSTNode, name: str) -> None:
        name = name.partition("|")[0]  # a script may have another by the same name where there is no apex
        if name in self._told:
            return
        self._told.add(name)
        advice = _ELSEWHERE.get(name, "The manual's page on apex says what takes its place in PyTorch.")
        self._plan.tell(
            node,
            "todo",
            f"`{name}` is still apex's",
            f"{advice} Or call `ampx_torch.apex.install()` before it is imported.",
        )

    # -- initialize --------------------------------------------------------------------------------------

    def _initialize(self, call: cst.Call) -> None:
        found = arguments(call, _INITIALIZE)
        if found is None or not found.keys() <= set(_INITIALIZE):
            raise self._plan.block(call, "`amp.initialize` with arguments that cannot be read", _BY_HAND)
        if "models" not in found:
            raise self._plan.block(call, "`amp.initialize` without a model", _BY_HAND)
        for name in _PROPERTIES:
            if name in found and not is_none(found[name]):
                raise self._plan.block(
                    call, f"`{name}` overrides a property of the level", "Choose a level, or `allow` and `deny` lists."
                )
        level = self._text(found.get("opt_level"), '"O1"')
        self._batchnorm(call, found.get("keep_batchnorm_fp32"), level)
        options = ['"torch"', 'dtype="float16"']
        if level != '"O1"':
            options.append(f"level={level}")
        options += self._scale(found)
        if self._text(found.get("enabled"), "True") != "True":
            options.append(f"enabled={as_bool(self._text(found['enabled'], ''))}")
        assignment = self._source.parent(call)
        init = self._plan.written(assignment, "ampx.init", options)
        if isinstance(assignment, cst.Return):
            self._plan.statement(assignment, lambda _: self._returned(call, found, init, level))
            return
        if not isinstance(assignment, cst.Assign) or len(assignment.targets) != 1 or assignment.value is not call:
            raise self._plan.block(call, "what `amp.initialize` returns is not assigned", _BY_HAND)
        lines = [init, *self._assign(call, assignment.targets[0].target, found, level)]
        self._plan.statement(assignment, lambda _: "\n".join(lines))

    def _returned(self, call: cst.Call, found: dict[str, cst.BaseExpression], init: str, level: str) -> str:
        """Write what returns the model and the optimizer under the names that were passed."""
        models, optimizers = found["models"], found.get("optimizers")
        names = [models] if optimizers is None or is_none(optimizers) else [models, optimizers]
        if not all(isinstance(one, cst.Name) for one in names):
            raise self._plan.block(call, "what `amp.initialize` returns is returned without a name", _BY_HAND)
        targets = names[0] if len(names) == 1 else cst.Tuple([cst.Element(one) for one in names])
        lines = self._assign(call, targets, found, level)
        return "\n".join([init, *lines, f"return {', '.join(self._source.code(one) for one in names)}"])

    def _assign(
        self, call: cst.Call, target: cst.BaseExpression, found: dict[str, cst.BaseExpression], level: str
    ) -> list[str]:
        """Write what prepares the models and wraps the optimizers into the targets of the old call."""
        lowers = level not in ('"O0"', '"O1"')
        models = self._text(found["models"], "")
        if "optimizers" not in found or is_none(found["optimizers"]):
            name = self._source.code(target)
            made = f"ampx.prepare({models})" if lowers else models
            return [] if made == name else [f"{name} = {made}"]
        if not isinstance(target, (cst.Tuple, cst.List)) or len(target.elements) != 2:
            raise self._plan.block(
                call, "`amp.initialize` returns a model and an optimizer, but not into two names", _BY_HAND
            )
        to_model, to_optimizer = (one.value for one in target.elements)
        optimizers = self._text(found["optimizers"], "")
        lines = []
        prepared_model, prepared_optimizer = self._source.code(to_model), self._source.code(to_optimizer)
        if lowers:
            lines.append(f"{prepared_model}, {prepared_optimizer} = ampx.prepare({models}, {optimizers})")
            optimizers = prepared_optimizer
        elif self._names(to_model) != self._names(found["models"]):
            lines.append(f"{prepared_model} = {models}")
        sources = self._elements(found["optimizers"]) if not lowers else self._elements(to_optimizer)
        targets = self._elements(to_optimizer)
        if sources is not None and targets is not None and len(sources) == len(targets):
            lines += [f"{name} = ampx.wrap_optimizer({raw})" for name, raw in zip(targets, sources, strict=True)]
        elif sources is not None and targets is None:
            listed = ", ".join(f"ampx.wrap_optimizer({raw})" for raw in sources)
            lines.append(f"{prepared_optimizer} = [{listed}]")
        else:
            lines.append(f"{prepared_optimizer} = ampx.wrap_optimizer({optimizers})")
        return lines

    def _elements(self, node: cst.BaseExpression) -> list[str] | None:
        if not isinstance(node, (cst.List, cst.Tuple)):
            return None
        return [self._source.code(one.value) for one in node.elements]

    def _names(self, node: cst.BaseExpression) -> list[str]:
        return self._elements(node) or [self._source.code(node)]

    def _batchnorm(self, call: cst.Call, value: cst.BaseExpression | None, level: str) -> None:
        text = self._text(value, "None").strip("\"'")
        if text == "None" or (level == '"O2"' and text == "True") or (level == '"O3"' and text == "False"):
            return
        if text in ("True", "False"):
            raise self._plan.block(
                call,
                f"`keep_batchnorm_fp32={text}` at level {level}",
                "O2 keeps normalization in float32 and O3 does not: choose the level that does what you want.",
            )
        self._plan.tell(
            call,
            "todo",
            f"`keep_batchnorm_fp32={text}` is left out",
            "O2 keeps normalization in float32 and O3 does not. Remove the option if nobody passes it.",
        )

    def _scale(self, found: dict[str, cst.BaseExpression]) -> list[str]:
        """Write the `loss_scale` option."""
        text = self._text(found.get("loss_scale"), "None")
        bounds = {
            field: self._source.code(found[name])
            for name, field in (("min_loss_scale", "min_scale"), ("max_loss_scale", "max_scale"))
            if name in found and not is_none(found[name])
        }
        plain = text.strip("\"'")
        if text == "None" or plain == "dynamic":
            if bounds:
                return [f"loss_scale={loss_scale(bounds)}"]
            return [] if text == "None" else ['loss_scale="dynamic"']
        value = number(plain)
        if value is not None:
            return [f"loss_scale={plain}"]
        dynamic = loss_scale(bounds) if bounds else '"dynamic"'
        unset = loss_scale(bounds) if bounds else '"auto"'
        return [f'loss_scale={unset} if {text} is None else {dynamic} if {text} == "dynamic" else float({text})']

    def _text(self, node: cst.BaseExpression | None, default: str) -> str:
        if node is None:
            return default
        if isinstance(node, cst.SimpleString):
            return f'"{node.raw_value}"'
        return self._source.code(node)

    # -- the rest ------------------------------------------------------------------------------------------

    def _scale_loss(self, call: cst.Call) -> tuple[cst.With, str]:
        item = self._source.parent(call)
        region = self._source.parent(item)
        found = arguments(call, _SCALE_LOSS)
        if not isinstance(item, cst.WithItem) or not isinstance(region, cst.With):
            raise self._plan.block(call, "`amp.scale_loss` is not entered by `with`", _BY_HAND)
        if found is None or not {"loss", "optimizers"} <= found.keys() <= set(_SCALE_LOSS):
            raise self._plan.block(call, "`amp.scale_loss` with arguments that cannot be read", _BY_HAND)

        def write(updated: cst.Call) -> cst.BaseExpression:
            made = arguments(updated, _SCALE_LOSS) or {}
            texts = [self._plan.code(made["loss"]), self._plan.code(made["optimizers"])]
            if "loss_id" in made and self._plan.code(made["loss_id"]) != "0":
                texts.append(f"loss_id={self._plan.code(made['loss_id'])}")
            return self._plan.parse_expression(f"ampx.scale_loss({', '.join(texts)})")

        self._plan.edit(call, write)
        return region, self._source.code(found["optimizers"])

    def _load(self, call: cst.Call) -> None:
        def write(updated: cst.Call) -> cst.BaseExpression:
            state = self._plan.code(updated.args[0].value)
            return self._plan.parse_expression(f"ampx.load_state_dict(ampx.import_state({state}))")

        self._plan.edit(call, write)

    def _register(self, call: cst.Call, function: str) -> None:
        """A function that is registered by module and name is replaced there by its annotated self."""
        args = [one.value for one in call.args]
        name = args[1] if len(args) == 2 else None
        module = dotted(args[0]) if len(args) == 2 else None
        if module is None or not isinstance(name, cst.SimpleString):
            raise self._plan.block(call, f"`{self._source.code(call)}` cannot be read", _BY_HAND)
        if any(one.partition(".")[0] == "torch" for one in self._source.qualified(args[0])):
            option = {"half_function": "allow", "float_function": "deny"}.get(function)
            advice = f"Pass `{option}=[{module}.{name.raw_value}]` to `ampx.init`." if option else _BY_HAND
            raise self._plan.block(call, f"`{self._source.code(call)}` registers a function of PyTorch", advice)
        full = f"{module}.{name.raw_value}"
        self._plan.statement(call, lambda _: f"{full} = ampx.{function}({full})")
