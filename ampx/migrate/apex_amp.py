"""The dialect of `apex.amp`."""

from __future__ import annotations

import ast
from collections.abc import Set
from typing import Final

from ampx.syntax.flow import Flow, Place
from ampx.syntax.program import FUNCTIONS, Function, Reference, arguments, dotted, is_none

from .apex_gradients import GradientReaders, elements
from .edits import WIDTH, Plan
from .numbers import as_bool, loss_scale, number
from .optimizers import asks_for_type, keeps
from .report import NeedsHumanError

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
_TESTS: Final = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.If, ast.IfExp)
_BY_HAND: Final = (
    "Rewrite this file by hand: the manual's page on apex shows the counterparts. Or import `amp` from "
    "`ampx_torch.apex`."
)


class ApexAmp:
    """Plans the edits of one program."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._program = plan.program
        self._renamed: set[ast.AST] = set()
        self._told: set[tuple[ast.AST, str]] = set()
        self._regions: dict[ast.AST, ast.expr] = {}  # the `scale_loss` blocks, with their optimizers
        self._masters: list[ast.Call] = []  # calls of `master_params`
        self._initialized: list[ast.Call] = []  # calls of `initialize`

    @property
    def _flow(self) -> Flow:
        return self._plan.flow

    def rewrite(self) -> None:
        """Plan everything."""
        for node, name in self._program.references():
            if name == "apex.amp":
                self._module(node)
            elif name.startswith(_AMP):
                self._replace(node, name.removeprefix(_AMP))
            elif name.startswith("apex."):
                self._elsewhere(node, name)
        regions, initialized = self._regions, self._initialized
        scaled = [call for call in initialized if self._has_optimizer(call)]
        if scaled and not regions:
            raise NeedsHumanError(
                scaled[0],
                "`amp.initialize` with an optimizer, and no `amp.scale_loss` in these files",
                "Whatever scales the loss for apex has to do it for ampx, by `ampx.scale_loss`. Rewrite this by hand.",
            )
        if regions or self._masters:
            GradientReaders(self._plan, regions, initialized).rewrite(self._masters)

    def _replace(self, node: Reference, verb: str) -> None:
        """Plan what takes the place of a name of `apex.amp`."""
        call = self._program.call_of(node)
        if verb in _SAME_NAME:
            self._plan.of(node).expression(node, f"ampx.{verb}")
        elif call is None or not self._replace_call(call, verb):
            raise NeedsHumanError(node, f"`{self._program.code(node)}` has no counterpart that is known", _BY_HAND)

    def _replace_call(self, call: ast.Call, verb: str) -> bool:
        """Plan what takes the place of a call; return False where it has no counterpart that is known."""
        if verb == "initialize":
            self._check_once(call, self._initialized)
            self._initialized.append(call)
            self._initialize(call)
        elif verb == "scale_loss":
            region, optimizers = self._scale_loss(call)
            self._regions[region] = optimizers
        elif verb == "master_params" and len(call.args) == 1 and not call.keywords:
            self._masters.append(call)
        elif verb == "disable_casts" and not call.args:
            self._plan.of(call).expression(call, "ampx.autocast(enabled=False)")
        elif verb == "load_state_dict" and len(call.args) == 1:
            self._load(call)
        elif verb in _REGISTER:
            self._register(call, _REGISTER[verb])
        else:
            return False
        return True

    def _has_optimizer(self, call: ast.Call) -> bool:
        optimizers = (arguments(call, _INITIALIZE) or {}).get("optimizers")
        return optimizers is not None and not is_none(optimizers)

    def _module(self, node: Reference) -> None:
        """Rename the module where a script asks whether it is there, and where it says that it is not."""
        if not isinstance(node, ast.Name) or not isinstance(self._program.parent(node), _TESTS):
            raise NeedsHumanError(node, "the module `apex.amp` is used as a value", _BY_HAND)
        edits = self._plan.of(node)
        edits.expression(node, "ampx")
        for assignment in self._program.every(ast.Assign, self._program.module(node)):
            target = assignment.targets[0]
            renamed = isinstance(target, ast.Name) and target.id == node.id and target not in self._renamed
            if renamed and is_none(assignment.value):
                self._renamed.add(target)
                edits.expression(target, "ampx")

    def _elsewhere(self, node: Reference, name: str) -> None:
        name = name.partition("|")[0]  # a script may have another by the same name where there is no apex
        key = self._program.module(node), name
        if key in self._told:
            return
        self._told.add(key)
        advice = _ELSEWHERE.get(name, "The manual's page on apex says what takes its place in PyTorch.")
        self._plan.of(node).tell(
            node,
            "todo",
            f"`{name}` is still apex's",
            f"{advice} Or call `ampx_torch.apex.install()` before it is imported.",
        )

    # -- initialize --------------------------------------------------------------------------------------

    def _check_once(self, call: ast.Call, others: list[ast.Call]) -> None:
        """Refuse a second call beside a first, which begins a second session."""
        branches = self._program.branches(call)
        for other in others:
            here = self._program.branches(other)
            if not any(branch in branches and branches[branch] is not holds for branch, holds in here.items()):
                raise NeedsHumanError(
                    call,
                    "a second `amp.initialize`; a process has one session of ampx for PyTorch",
                    "Call `ampx.init` once, and wrap each optimizer.",
                )

    def _initialize(self, call: ast.Call) -> None:
        values = arguments(call, _INITIALIZE)
        if values is None:
            raise NeedsHumanError(call, "`amp.initialize` with arguments that cannot be read", _BY_HAND)
        if "models" not in values:
            raise NeedsHumanError(call, "`amp.initialize` without a model", _BY_HAND)
        for name in _PROPERTIES:
            if name in values and not is_none(values[name]):
                raise NeedsHumanError(
                    call, f"`{name}` overrides a property of the level", "Choose a level, or `allow` and `deny` lists."
                )
        level = self._text(values.get("opt_level"), '"O1"')
        self._batchnorm(call, values.get("keep_batchnorm_fp32"), level)
        options = ['"torch"', 'dtype="float16"']
        if level != '"O1"':
            options.append(f"level={level}")
        options += self._scale(values)
        if self._text(values.get("enabled"), "True") != "True":
            options.append(f"enabled={as_bool(self._text(values['enabled'], ''))}")
        statement = self._program.parent(call)
        edits = self._plan.of(call)
        if isinstance(statement, ast.Return):
            init = edits.written(statement, "ampx.init", options)
            text = self._returned(call, values, init, level)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            init = edits.written(statement, "ampx.init", options)
            text = "\n".join([init, *self._assign(call, statement.targets[0], values, level)])
        else:
            raise NeedsHumanError(call, "what `amp.initialize` returns is not assigned", _BY_HAND)
        edits.statement(call, lambda: text)

    def _returned(self, call: ast.Call, values: dict[str, ast.expr], init: str, level: str) -> str:
        """Write what returns the model and the optimizer under the names that were passed."""
        models, optimizers = values["models"], values.get("optimizers")
        names = [models] if optimizers is None or is_none(optimizers) else [models, optimizers]
        if not all(isinstance(name, ast.Name) for name in names):
            raise NeedsHumanError(call, "what `amp.initialize` returns is returned without a name", _BY_HAND)
        function = self._program.function(call)
        if isinstance(function, FUNCTIONS) and len(names) == 2:
            self._check_callers(function)
        target = names[0] if len(names) == 1 else ast.Tuple(names)
        lines = self._assign(call, target, values, level)
        return "\n".join([init, *lines, f"return {', '.join(self._program.code(name) for name in names)}"])

    def _assign(self, call: ast.Call, target: ast.expr, values: dict[str, ast.expr], level: str) -> list[str]:
        """Write what prepares the models and wraps the optimizers into the targets of the old call."""
        code = self._program.code
        lowers = level not in ('"O0"', '"O1"')
        models = self._text(values["models"], "")
        if "optimizers" not in values or is_none(values["optimizers"]):
            name = code(target)
            prepared = f"ampx.prepare({models})" if lowers else models
            return [] if prepared == name else [f"{name} = {prepared}"]
        if not isinstance(target, (ast.Tuple, ast.List)) or len(target.elts) != 2:
            raise NeedsHumanError(
                call, "`amp.initialize` returns a model and an optimizer, but not into two names", _BY_HAND
            )
        to_model, to_optimizer = target.elts
        self._check_holders(call, values["optimizers"], to_optimizer)
        if lowers:
            optimizers = self._text(values["optimizers"], "")
            prepared = f"{code(to_model)}, {code(to_optimizer)} = ampx.prepare({models}, {optimizers})"
            return [prepared, *self._wrap(to_optimizer, to_optimizer)]
        moved = self._names(to_model) != self._names(values["models"])
        lines = [f"{code(to_model)} = {models}"] if moved else []
        return [*lines, *self._wrap(values["optimizers"], to_optimizer)]

    def _wrap(self, optimizers: ast.expr, target: ast.expr) -> list[str]:
        """Write what wraps optimizers, one by one where they are written out."""
        sources, targets = self._elements(optimizers), self._elements(target)
        name = self._program.code(target)
        if sources is None or (targets is not None and len(sources) != len(targets)):
            return [f"{name} = ampx.wrap_optimizer({self._text(optimizers, '')})"]
        if targets is None:
            return [f"{name} = [{', '.join(f'ampx.wrap_optimizer({raw})' for raw in sources)}]"]
        return [f"{to} = ampx.wrap_optimizer({raw})" for to, raw in zip(targets, sources, strict=True)]

    def _elements(self, node: ast.expr) -> list[str] | None:
        if not isinstance(node, (ast.List, ast.Tuple)):
            return None
        return [self._program.code(element) for element in node.elts]

    def _names(self, node: ast.expr) -> list[str]:
        return self._elements(node) or [self._program.code(node)]

    # -- who else has the optimizer: apex changed the object itself, ampx returns another ---------------------

    def _check_holders(self, call: ast.Call, optimizers: ast.expr, target: ast.expr) -> None:
        """Refuse where something goes on with an optimizer that is not the wrapped one."""
        program, flow = self._program, self._flow
        home = program.function(call)
        targets = {flow.place(element) for element in elements(target)}
        for raw in elements(optimizers):
            place = flow.place(raw)
            if place is None:
                self._check_made_here(raw, target)
                continue
            for use in flow.uses_at(place):
                if not program.inside(use, call) and program.function(use) is home:
                    self._check_use(use, call, place in targets)
            passed = any(isinstance(binding.node, ast.arg) for binding in flow.bindings_at(place))
            if isinstance(home, FUNCTIONS) and passed:
                self._check_left(call, home, place)
            else:
                self._check_makers(home, raw, targets)

    def _check_use(self, use: Reference, call: ast.Call, is_replaced: bool) -> None:
        """Refuse another use of an optimizer, beside the call that wraps it, if that needs the wrapped one."""
        program = self._program
        if asks_for_type(program, use):
            code = program.code(program.parent(use))
            raise NeedsHumanError(use, f"`{code}` is the wrapper's class", "Use isinstance.")
        if program.order(use) < program.order(call) and keeps(program, use):
            raise NeedsHumanError(
                use, f"`{self._line(use)}` keeps the optimizer before `amp.initialize`", "Move it behind that line."
            )
        if program.order(use) > program.order(call) and not is_replaced:
            raise NeedsHumanError(
                use, f"`{self._line(use)}` uses the optimizer that was not wrapped", "Use what is assigned above."
            )

    def _line(self, node: ast.AST) -> str:
        """Return the first line of a statement."""
        return self._program.code(self._program.statement(node)).strip().split("\n")[0]

    def _check_made_here(self, raw: ast.expr, target: ast.expr) -> None:
        """Refuse optimizers that are taken out of something, which goes on with those that are not wrapped."""
        code = self._program.code(raw).strip()
        makes = isinstance(raw, ast.Call) and (self._program.qualified(raw.func) or self._flow.place(raw.func))
        if not makes and ast.unparse(raw) not in [ast.unparse(element) for element in elements(target)]:
            raise NeedsHumanError(
                raw, f"`{code}`: what it is taken from keeps the optimizers that are not wrapped", _BY_HAND
            )

    def _check_makers(self, home: Function | ast.Module, raw: ast.expr, targets: Set[Place | None]) -> None:
        """Refuse where the function that made the optimizer steps it itself, and another one wraps it."""
        program, flow = self._program, self._flow
        for origin in flow.origins(raw) or ():
            place = flow.place(origin.node)
            if program.function(origin.node) is home or place is None or place in targets:
                continue
            for use in flow.uses_at(place):
                method = program.parent(use)
                steps = isinstance(method, ast.Attribute) and method.attr in ("step", "zero_grad")
                scales = any(isinstance(outer, ast.withitem) for outer in program.around(use))
                if steps or scales:
                    raise NeedsHumanError(
                        use, f"`{self._line(use)}` uses the optimizer that was not wrapped", "Use the one that was."
                    )

    def _check_left(self, call: ast.Call, home: Function, place: Place) -> None:
        """Refuse where the callers of a function go on with the optimizer that they passed."""
        program, flow = self._program, self._flow
        returns = [node for node in program.under(home, ast.Return) if program.function(node) is home]
        if any(self._mentions(node, place) for node in returns):
            self._check_callers(home)
            return
        for caller in flow.calls_of(home):
            for parameter, value in flow.passed(caller, home):
                if parameter.arg == place[1] and self._is_used_after(value, caller):
                    raise NeedsHumanError(
                        call,
                        f"`{home.name}` wraps an optimizer that its callers go on with",
                        "Return it, and use that.",
                    )

    def _is_used_after(self, value: ast.expr, call: ast.Call) -> bool:
        """Return whether a function goes on with what it passed to a call, or may in the next turn of a loop."""
        program = self._program
        return any(
            use is not value and (program.order(use) > program.end(call) or program.loops(call))
            for use in self._flow.uses_at(self._flow.place(value))
            if program.function(use) is program.function(call)
        )

    def _mentions(self, node: ast.AST, place: Place) -> bool:
        names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
        return any(self._flow.place(name) == place for name in names)

    def _check_callers(self, function: Function) -> None:
        """Refuse where a caller does not use what a function returns: it has the optimizer that is not wrapped."""
        for caller in self._flow.calls_of(function):
            if isinstance(self._program.parent(caller), ast.Expr):
                raise NeedsHumanError(
                    caller,
                    f"`{function.name}` returns the wrapped optimizer, which is not used here",
                    "Assign it: apex changed the optimizer itself, ampx returns another.",
                )

    def _batchnorm(self, call: ast.Call, value: ast.expr | None, level: str) -> None:
        text = self._text(value, "None").strip("\"'")
        if text == "None" or (level == '"O2"' and text == "True") or (level == '"O3"' and text == "False"):
            return
        if text in ("True", "False"):
            raise NeedsHumanError(
                call,
                f"`keep_batchnorm_fp32={text}` at level {level}",
                "O2 keeps normalization in float32 and O3 does not: choose the level that does what you want.",
            )
        self._plan.of(call).tell(
            call,
            "todo",
            f"`keep_batchnorm_fp32={text}` is left out",
            "O2 keeps normalization in float32 and O3 does not. Remove the option if nobody passes it.",
        )

    def _scale(self, values: dict[str, ast.expr]) -> list[str]:
        """Write the `loss_scale` option."""
        text = self._text(values.get("loss_scale"), "None")
        bounds = {
            field: self._program.code(values[name])
            for name, field in (("min_loss_scale", "min_scale"), ("max_loss_scale", "max_scale"))
            if name in values and not is_none(values[name])
        }
        plain = text.strip("\"'")
        if text == "None" or plain == "dynamic":
            if bounds:
                return [f"loss_scale={loss_scale(bounds)}"]
            return [] if text == "None" else ['loss_scale="dynamic"']
        if number(plain) is not None:
            return [f"loss_scale={plain}"]
        if bounds:
            cases = [loss_scale(bounds), f'if {text} in (None, "dynamic")', f"else float({text})"]
        else:
            cases = ['"auto"', f"if {text} is None", f'else "dynamic" if {text} == "dynamic"', f"else float({text})"]
        option = f"loss_scale={' '.join(cases)}"
        if len(option) < WIDTH - 20:
            return [option]
        return ["loss_scale=(\n" + "".join(f"        {line}\n" for line in cases) + "    )"]

    def _text(self, node: ast.expr | None, default: str) -> str:
        if node is None:
            return default
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            code = self._program.code(node)
            return f'"{code[1:-1]}"' if code[:1] in "\"'" and code[:3] not in ('"""', "'''") else code
        return self._program.code(node)

    # -- the rest ------------------------------------------------------------------------------------------

    def _scale_loss(self, call: ast.Call) -> tuple[ast.stmt, ast.expr]:
        item = self._program.parent(call)
        region = self._program.parent(item)
        values = arguments(call, _SCALE_LOSS)
        if not isinstance(item, ast.withitem) or not isinstance(region, ast.With):
            raise NeedsHumanError(call, "`amp.scale_loss` is not entered by `with`", _BY_HAND)
        if values is None or not {"loss", "optimizers"} <= values.keys():
            raise NeedsHumanError(call, "`amp.scale_loss` with arguments that cannot be read", _BY_HAND)
        edits = self._plan.of(call)

        def write() -> str:
            texts = [edits.code(values["loss"]), edits.code(values["optimizers"])]
            if "loss_id" in values and edits.code(values["loss_id"]) != "0":
                texts.append(f"loss_id={edits.code(values['loss_id'])}")
            return f"ampx.scale_loss({', '.join(texts)})"

        edits.expression(call, write)
        return region, values["optimizers"]

    def _load(self, call: ast.Call) -> None:
        edits, state = self._plan.of(call), call.args[0]
        edits.expression(call, lambda: f"ampx.load_state_dict(ampx.import_state({edits.code(state)}))")

    def _register(self, call: ast.Call, function: str) -> None:
        """A function that is registered by module and name is replaced there by its annotated self."""
        code = self._program.code
        name = call.args[1] if len(call.args) == 2 else None
        module = dotted(call.args[0]) if len(call.args) == 2 else None
        if module is None or not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            raise NeedsHumanError(call, f"`{code(call)}` cannot be read", _BY_HAND)
        if any(full.partition(".")[0] == "torch" for full in self._program.qualified(call.args[0])):
            option = {"half_function": "allow", "float_function": "deny"}.get(function)
            advice = f"Pass `{option}=[{module}.{name.value}]` to `ampx.init`." if option else _BY_HAND
            raise NeedsHumanError(call, f"`{code(call)}` registers a function of PyTorch", advice)
        full_name = f"{module}.{name.value}"
        self._plan.of(call).statement(call, lambda: f"{full_name} = ampx.{function}({full_name})")
