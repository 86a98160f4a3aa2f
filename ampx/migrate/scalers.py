"""Rewrite code around a `GradScaler`: the session takes the scaler's place, and its optimizers are wrapped.

The name that held the scaler holds the session afterwards, so that functions it is passed to, attributes it is kept
in and checkpoints that save its state go on working.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import libcst as cst

from .asked_scale import refuse_between_step_and_update, write_scale
from .backwards import BY_HAND, Backwards, Scaler
from .flow import Binding, Flow, Place, is_none
from .plan import Plan
from .source import Reference
from .wrapping import Start, wrap

_TESTS = (cst.Comparison, cst.If, cst.IfExp, cst.BooleanOperation, cst.UnaryOperation, cst.ComparisonTarget, cst.While)


class ScalerRewriter:
    """Plans the edits for every scaler of one file."""

    def __init__(self, plan: Plan, flow: Flow, constructors: Set[str], write_init: Callable[[cst.Call], str]) -> None:
        """Take what the dialect knows.

        Args:
            plan: Receives the edits.
            flow: Bindings and uses of the file.
            constructors: Full names of the scaler's class.
            write_init: Gives the `ampx.init` call for a constructor call.
        """
        self._plan = plan
        self._source = plan.source
        self._flow = flow
        self._constructors = constructors
        self._write_init = write_init
        self._backwards = Backwards(plan, flow)

    def rewrite(self) -> list[Scaler]:
        """Plan everything; give the scalers found.

        Raises:
            NeedsHumanError: Something about a scaler is not fully understood.
        """
        scalers = []
        for node, name in self._source.references():
            if name not in self._constructors:
                continue
            parent = self._source.parent(node)
            self._plan.claim(node)
            if isinstance(parent, cst.Call) and parent.func is node:
                scalers.append(self._begin(parent))
            elif self._is_type(node):
                self._plan.expression(node, "ampx.Amp")
            else:
                raise self._plan.block(node, f"`{self._source.code(node)}` is used without being called", BY_HAND)
        for scaler in scalers:
            self._follow(scaler)
            self._check_bindings(scaler)
            for place in scaler.places:
                for use in self._flow.uses.get(place, []):
                    self._use(scaler, use)
        claimed: set[Place] = set()
        for scaler in scalers:
            if claimed & scaler.places:
                raise self._plan.block(scaler.call, "two scalers share a name", BY_HAND)
            claimed |= scaler.places
            self._finish(scaler)
        return scalers

    def _is_type(self, node: Reference) -> bool:
        """Tell whether the class is named in an annotation, or asked for by isinstance."""
        for one in self._source.around(node):
            if isinstance(one, cst.Annotation):
                return True
            if isinstance(one, cst.BaseStatement):
                return False
            if isinstance(one, cst.Call):
                return self._source.code(one.func) == "isinstance"
        return False

    # -- where it is made, and what holds it ---------------------------------------------------------

    def _begin(self, call: cst.Call) -> Scaler:
        value: cst.CSTNode = call
        maybe_none = False
        parent = self._source.parent(value)
        if isinstance(parent, cst.IfExp) and value is not parent.test:
            other = parent.orelse if parent.body is value else parent.body
            if not is_none(other):
                raise self._plan.block(parent, f"`{self._source.code(parent)}` makes one of two things", BY_HAND)
            maybe_none, value, parent = True, parent, self._source.parent(parent)
        target: cst.CSTNode | None = None
        if isinstance(parent, cst.Assign) and len(parent.targets) == 1 and parent.value is value:
            target = parent.targets[0].target
        elif isinstance(parent, cst.AnnAssign) and parent.value is value:
            target = parent.target
        place = None if target is None else self._flow.place(target)
        if target is None or place is None:
            raise self._plan.block(call, f"`{self._source.code(call)}` is not kept in a variable", BY_HAND)
        statement = self._source.statement(call)
        if self._source.loops(statement):
            raise self._plan.block(call, "a scaler is made in a loop", BY_HAND)
        maybe_none = maybe_none or any(is_none(one.value) for one in self._flow.bindings.get(place, []))
        name = self._source.code(target)
        scaler = Scaler(call, Start(statement, name, maybe_none), self._write_init(call), {place})
        self._plan.expression(call, scaler.init)
        return scaler

    def _follow(self, scaler: Scaler) -> None:
        """Add the parameters and attributes that the scaler is passed on to."""
        waiting = list(scaler.places)
        while waiting:
            for use in self._flow.uses.get(waiting.pop(), []):
                for place in self._passed_to(use):
                    if place not in scaler.places:
                        scaler.places.add(place)
                        waiting.append(place)

    def _passed_to(self, use: Reference) -> list[Place]:
        parent = self._source.parent(use)
        if isinstance(parent, cst.Assign) and parent.value is use:
            places = [self._flow.place(one.target) for one in parent.targets]
            return [one for one in places if one is not None]
        if isinstance(parent, cst.Arg):
            return [
                place
                for place, bindings in self._flow.bindings.items()
                if any(value is use for value in self._flow.arguments(place))
                and any(isinstance(one.node, cst.Param) for one in bindings)
            ]
        return []

    def _check_bindings(self, scaler: Scaler) -> None:
        for place in scaler.places:
            for binding in self._flow.bindings.get(place, []):
                if not self._is_scaler(scaler, binding):
                    code = self._source.code(binding.node).strip()
                    raise self._plan.block(
                        binding.node, f"`{code}` is the scaler here and something else there", BY_HAND
                    )

    def _is_scaler(self, scaler: Scaler, binding: Binding) -> bool:
        if isinstance(binding.node, cst.Param):
            place = next(one for one, bindings in self._flow.bindings.items() if binding in bindings)
            passed = [self._flow.place(one) for one in self._flow.arguments(place) if not is_none(one)]
            return all(one in scaler.places for one in passed)
        value = binding.value
        if value is None:
            return False
        if value is scaler.call or is_none(value) or self._flow.place(value) in scaler.places:
            return True
        return isinstance(value, cst.IfExp) and scaler.call in (value.body, value.orelse)

    # -- what is done with it ------------------------------------------------------------------------

    def _use(self, scaler: Scaler, use: Reference) -> None:
        parent = self._source.parent(use)
        if isinstance(parent, cst.Attribute):
            call = self._source.parent(parent)
            if not isinstance(call, cst.Call) or call.func is not parent:
                raise self._unknown(parent)
            self._method(scaler, parent.attr.value, call)
        elif isinstance(parent, cst.Arg):
            call = self._source.parent(parent)
            known = bool(self._passed_to(use)) or (
                isinstance(call, cst.Call) and self._source.code(call.func) == "isinstance"
            )
            if not known:
                raise self._plan.block(
                    use,
                    f"the scaler is passed to `{self._source.code(call.func) if isinstance(call, cst.Call) else ''}`, "
                    "which is not a function of this file",
                    "Migrate both files by hand, or move the training step into this one.",
                )
        elif not (isinstance(parent, _TESTS) or (isinstance(parent, cst.Assign) and self._passed_to(use))):
            raise self._unknown(parent)

    def _unknown(self, node: cst.CSTNode) -> Exception:
        return self._plan.block(node, f"`{self._source.code(node).strip()}` has no counterpart that is known", BY_HAND)

    def _method(self, scaler: Scaler, name: str, call: cst.Call) -> None:
        args = [one.value for one in call.args if not one.star]
        is_statement = isinstance(self._source.parent(call), cst.Expr)
        if name == "scale" and len(args) == 1:
            scaler.backward.append(call)
        elif (name, len(args)) in (("step", 1), ("minimize", 2)) and is_statement:
            self._step(scaler, call, args[0])
        elif name == "unscale_" and len(args) == 1 and is_statement:
            self._note_optimizer(scaler, args[0])
            self._plan.edit(call.func, lambda updated: self._plan.parse_expression("ampx.unscale"))
        elif name == "update" and not call.args and is_statement:
            scaler.updates.append(call)
            self._plan.remove(self._source.parent(call))
        elif name in ("get_scale", "get_loss_scaling") and not call.args:
            scaler.loads.append(call)  # rewritten when the optimizers are known
        elif name in ("is_enabled", "is_enable") and not call.args:
            self._plan.edit(call, lambda updated: updated.func.with_changes(attr=cst.Name("enabled")))
        elif name == "load_state_dict" and len(args) == 1:
            scaler.loads.append(call)
            self._plan.edit(
                args[0],
                lambda updated: self._plan.parse_expression(f"ampx.import_state({self._plan.code(updated)})"),
            )
        elif not (name == "state_dict" and not call.args):
            raise self._unknown(call)

    def _step(self, scaler: Scaler, call: cst.Call, optimizer: cst.BaseExpression) -> None:
        self._note_optimizer(scaler, optimizer)
        scaler.steps.append((call, optimizer))
        self._plan.expression(call, f"{self._source.code(optimizer)}.step()")

    def _note_optimizer(self, scaler: Scaler, optimizer: cst.BaseExpression) -> None:
        if self._key(optimizer) not in [self._key(one) for one in scaler.optimizers]:
            scaler.optimizers.append(optimizer)

    def _key(self, optimizer: cst.BaseExpression) -> frozenset[object]:
        """Tell optimizers apart by where they are made."""
        return frozenset(one.node for one in self._flow.origins(optimizer) or ()) or frozenset({optimizer})

    # -- what needs to know all of it ----------------------------------------------------------------

    def _finish(self, scaler: Scaler) -> None:
        if not scaler.steps:
            raise self._plan.block(scaler.call, "no optimizer is stepped through this scaler here", BY_HAND)
        scaler.backward.sort(key=self._source.order)
        scaler.steps.sort(key=lambda step: self._source.order(step[0]))
        points = wrap(self._plan, self._flow, scaler.start, scaler.optimizers)
        if len(scaler.optimizers) > 1:
            self._plan.tell(
                scaler.call,
                "note",
                f"{len(scaler.optimizers)} optimizers share a loss scale, as they shared the scaler",
                "Wrap them one by one if each shall have its own.",
            )
        self._refuse_raw_steps(scaler)
        for call in scaler.backward:
            self._backwards.rewrite(scaler, call)
        for call in scaler.loads:
            method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            if method != "load_state_dict":
                refuse_between_step_and_update(self._plan, scaler, call)
                self._plan.expression(call, write_scale(self._plan, self._backwards, scaler, call))
                continue
            home = self._source.function(call)
            for point in points:
                if self._source.function(point) is home and self._source.order(point) > self._source.order(call):
                    raise self._plan.block(call, "the state is loaded before the optimizer is made", BY_HAND)

    def _is_switched_off(self, scaler: Scaler, node: cst.CSTNode) -> bool:
        """Tell whether a node is only reached where the scaler's own switch is off, and the session with it."""
        switches = [one.value for one in scaler.call.args if one.keyword and one.keyword.value.startswith("enable")]
        switch = self._source.code(switches[0]).removeprefix("self.") if switches else None
        return any(
            isinstance(one, cst.If)
            and part is not one.body
            and self._source.code(one.test).removeprefix("self.") == switch
            for one, part in self._source.branches(node).items()
        )

    def _refuse_raw_steps(self, scaler: Scaler) -> None:
        if scaler.start.maybe_none or self._source.branches(scaler.start.statement):
            return  # the script steps either way, and wraps only where there is a session
        keys = [self._key(one) for one in scaler.optimizers]
        for call in self._source.every(cst.Call):
            func = call.func
            if isinstance(func, cst.Attribute) and func.attr.value == "step" and self._key(func.value) in keys:
                if self._is_switched_off(scaler, call):
                    continue
                raise self._plan.block(
                    call,
                    f"`{self._source.code(call)}` steps without the scaler, which is always made",
                    "Make the scaler with `enabled=` what decides here, use it in both cases, and migrate again.",
                )
