"""Find the place where optimizers are to be wrapped, after they are made and after the session has begun."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from .flow import Binding, Flow
from .plan import Plan

_ADVICE = "Call `ampx.wrap_optimizer` on it where it is made, after `ampx.init`; then migrate the rest by hand."


@dataclass(frozen=True)
class Start:
    """Where a session begins.

    Attributes:
        statement: The line after which it is there.
        name: What holds the session in that line; None for the module-level functions.
        maybe_none: Whether what holds it may be None instead.
    """

    statement: cst.CSTNode
    name: str | None
    maybe_none: bool


def wrap(
    plan: Plan, flow: Flow, start: Start, optimizers: list[cst.BaseExpression], options: str = ""
) -> list[cst.CSTNode]:
    """Plan the wrapping of the optimizers that share one loss scale; give the lines after which it stands.

    Raises:
        NeedsHumanError: Where they are made cannot be told, or comes in no order with the session.
    """
    source = plan.source
    groups: list[tuple[str, list[Binding]]] = []
    for one in optimizers:
        found = flow.origins(one)
        if not found:
            raise plan.block(one, f"it cannot be told where `{source.code(one)}` is made", _ADVICE)
        for binding in found:
            name = source.code(binding.node)
            place = flow.place(binding.node)
            known = next((group for group in groups if flow.place(group[1][0].node) == place), None)
            if known is None:
                groups.append((name, [binding]))
            elif binding not in known[1]:
                known[1].append(binding)
    bindings = [binding for _, group in groups for binding in group]
    names = [name for name, _ in groups]
    if all(_precedes(plan, one, start) for one in bindings):
        plan.insert_after(start.statement, _text(names, start, options))
        return [start.statement]
    late = [one for one in bindings if not _precedes(plan, one, start)]
    for binding in late:
        _check_after(plan, binding, start)
    if len(names) == 1:
        if len(late) < len(bindings):
            raise plan.block(late[0].node, f"`{names[0]}` is made before and after the session begins", _ADVICE)
        points: list[cst.CSTNode] = [source.statement(one.node) for one in late]
        for point in points:
            plan.insert_after(point, _text(names, start, options))
        return points
    last = max(bindings, key=lambda one: source.order(one.node))
    blocks = {source.block(source.statement(one.node)) for one in late}
    if len(blocks) > 1 or len(bindings) > len(names):
        raise plan.block(last.node, f"{', '.join(names)} share a loss scale and are made in several places", _ADVICE)
    plan.insert_after(source.statement(last.node), _text(names, start, options))
    return [source.statement(last.node)]


def _text(names: list[str], start: Start, options: str) -> str:
    wrap_optimizer = f"{start.name}.wrap_optimizer" if start.maybe_none else "ampx.wrap_optimizer"
    if len(names) == 1:
        line = f"{names[0]} = {wrap_optimizer}({names[0]}{options})"
    else:
        listed = ", ".join(names)
        line = f"{listed} = {wrap_optimizer}([{listed}]{options})"
    return f"if {start.name} is not None:\n    {line}" if start.maybe_none else line


def _precedes(plan: Plan, binding: Binding, start: Start) -> bool:
    """Tell whether a value is surely there when the session begins, and made as often."""
    source = plan.source
    if source.function(binding.node) is not source.function(start.statement):
        return False
    if source.order(binding.node) > source.order(start.statement):
        return False
    here, there = source.branches(start.statement), source.branches(binding.node)
    exclusive = any(here[one] is not part for one, part in there.items() if one in here)
    return not exclusive and source.loops(binding.node) == source.loops(start.statement)


def _check_after(plan: Plan, binding: Binding, start: Start) -> None:
    source = plan.source
    home, other = source.function(start.statement), source.function(binding.node)
    name = source.code(binding.node)
    if home is other:
        after = source.order(binding.node) > source.order(start.statement)
        block = source.block(start.statement)
        if after and (start.maybe_none or any(one is block for one in source.around(binding.node))):
            return
    elif isinstance(home, cst.Module) and not start.maybe_none:
        return
    raise plan.block(binding.node, f"it cannot be told whether `{name}` is made after the session begins", _ADVICE)
