"""The backward calls of code around a `GradScaler`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import libcst as cst

from .flow import Flow, Place
from .plan import Plan
from .wrapping import Start

BY_HAND: Final = "Rewrite this file by hand: the manual's pages on migration show the counterparts."


@dataclass
class Scaler:
    """One constructor call and what hangs on it.

    Attributes:
        call: The constructor call.
        start: Where it is made.
        init: The call of `ampx.init` that takes its place.
        places: What holds it.
        backward: Calls of `scale` in the order of the text.
        steps: Calls that step an optimizer, with the optimizer.
        optimizers: What is stepped or unscaled, one expression for each optimizer.
        updates: Calls that move its scale.
        loads: Calls that load its state or ask for its scale.
    """

    call: cst.Call
    start: Start
    init: str
    places: set[Place] = field(default_factory=set)
    backward: list[cst.Call] = field(default_factory=list)
    steps: list[tuple[cst.Call, cst.BaseExpression]] = field(default_factory=list)
    optimizers: list[cst.BaseExpression] = field(default_factory=list)
    updates: list[cst.Call] = field(default_factory=list)
    loads: list[cst.Call] = field(default_factory=list)


class Backwards:
    """Puts each backward into a `scale_loss` block for the optimizers it makes gradients for."""

    def __init__(self, plan: Plan, flow: Flow) -> None:
        """Choose a name for scaled losses that the file does not use."""
        self._plan = plan
        self._source = plan.source
        self._flow = flow
        self._scaled_name = _free_name("scaled_loss", self._source.names_used())

    def rewrite(self, scaler: Scaler, call: cst.Call) -> None:
        """Plan the edit of one call of `scale`.

        Raises:
            NeedsHumanError: It is not followed by its backward, or it is not clear whose gradients are made.
        """
        optimizers = ", ".join(self._stepped_after(scaler, call))
        if ", " in optimizers:
            optimizers = f"[{optimizers}]"
        statement = self._source.parent(call)
        if isinstance(statement, cst.Attribute) and statement.attr.value == "backward":
            backward = self._source.parent(statement)
            if isinstance(backward, cst.Call) and isinstance(self._source.parent(backward), cst.Expr):
                name = self._scaled_name

                def write(expression: cst.Expr) -> str:
                    outer = cst.ensure_type(expression.value, cst.Call)
                    loss = cst.ensure_type(cst.ensure_type(outer.func, cst.Attribute).value, cst.Call).args[0].value
                    inner = self._plan.code(
                        outer.with_changes(func=cst.Attribute(cst.Name(name), cst.Name("backward")))
                    )
                    return f"with ampx.scale_loss({self._plan.code(loss)}, {optimizers}) as {name}:\n    {inner}"

                self._plan.statement(backward, write)
                return
        if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
            target = self._source.code(statement.targets[0].target)
            after = self._next(statement)
            if after is not None and self._source.code(after).strip().startswith(f"{target}.backward("):
                rest = self._source.code(after.body[0]).strip()

                def write_two(assignment: cst.Assign) -> str:
                    loss = self._plan.code(cst.ensure_type(assignment.value, cst.Call).args[0].value)
                    return f"with ampx.scale_loss({loss}, {optimizers}) as {target}:\n    {rest}"

                self._plan.statement(statement, write_two)
                self._plan.remove(after.body[0])
                return
        raise self._plan.block(
            call,
            f"`{self._source.code(call)}` is not followed by `.backward()`",
            "Put the backward call into `with ampx.scale_loss(loss, optimizer) as scaled_loss:`.",
        )

    def _next(self, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
        statement = self._source.statement(node)
        block = self._source.block(statement)
        body = list(block.body) if isinstance(block, (cst.IndentedBlock, cst.Module)) else []
        position = body.index(statement) + 1 if statement in body else len(body)
        after = body[position] if position < len(body) else None
        return after if isinstance(after, cst.SimpleStatementLine) and len(after.body) == 1 else None

    def _stepped_after(self, scaler: Scaler, call: cst.Call) -> list[str]:
        """Give the optimizers whose gradients a backward makes: those stepped between it and the next one after."""
        home = self._source.function(call)
        here = self._source.order(call)
        events = [(self._source.order(one), None) for one in scaler.backward if self._source.function(one) is home]
        events += [
            (self._source.order(one), optimizer)  # type: ignore[misc]
            for one, optimizer in scaler.steps
            if self._source.function(one) is home
        ]
        found: list[str] = []
        for order, optimizer in sorted(events, key=lambda event: event[0]):
            if order <= here:
                continue
            if optimizer is not None:
                text = self._source.code(optimizer)
                found += [] if text in found else [text]
            elif found:
                break
        if not found and len(scaler.optimizers) > 1:
            raise self._plan.block(call, "it cannot be told which optimizers this backward is for", BY_HAND)
        return found or self.visible(scaler, call)

    def visible(self, scaler: Scaler, node: cst.CSTNode) -> list[str]:
        """Give an optimizer of the scaler as it can be named at a node; all have the same loss scale."""
        home = self._source.function(node)
        for call, optimizer in scaler.steps:
            if self._source.function(call) is home:
                return [self._source.code(optimizer)]
        for optimizer in scaler.optimizers:
            for origin in self._flow.origins(optimizer) or ():
                if self._source.function(origin.node) is home or self._is_seen(origin.node, node):
                    return [self._source.code(origin.node)]
        raise self._plan.block(node, "it cannot be told which optimizer this is for", BY_HAND)

    def _is_seen(self, optimizer: cst.CSTNode, node: cst.CSTNode) -> bool:
        text = self._source.code(optimizer)
        if text.startswith("self."):
            return self._source.enclosing_class(optimizer) is self._source.enclosing_class(node)
        place = self._flow.place(optimizer)
        return place is not None and place[0] is self._source.scope(self._source.module)


def _free_name(name: str, used: set[str]) -> str:
    while name in used:
        name += "_"
    return name
