"""Code of apex scripts that looks at gradients between backward and step.

apex leaves true gradients behind when a `scale_loss` block ends; ampx leaves them scaled until the step. So whatever
reads or clips them in between gets them made true first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import libcst as cst

from .flow import Flow
from .plan import Plan
from .source import arguments

_CLIPS: Final = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grad_value"}
_STEPS: Final = {"step"}


class GradientReaders:
    """Plans what makes gradients true in time, and the end of `master_params`."""

    def __init__(self, plan: Plan, flow: Flow, scaled: Sequence[tuple[cst.With, str]]) -> None:
        """Take the `scale_loss` blocks, each with the code of its optimizers."""
        self._plan = plan
        self._source = plan.source
        self._flow = flow
        self._scaled = scaled
        self._readers = {
            one.name.value for one in self._source.every(cst.FunctionDef) if self._reads(one) and not self._scales(one)
        }

    def rewrite(self, masters: Sequence[cst.Call]) -> None:
        """Plan the edits; `masters` are the calls of `master_params`."""
        clipped = {call for call in masters if self._clip(call)}
        for call in masters:
            if call not in clipped:
                optimizer = self._source.code(call.args[0].value)
                self._plan.expression(
                    call,
                    f'(parameter for group in {optimizer}.param_groups for parameter in group["params"])',
                )
        done: set[cst.CSTNode] = set()
        for region, optimizers in self._scaled:
            blocks: set[cst.CSTNode] = set()
            for statement in self._until_step(region):
                if statement in done or not self._looks(statement, clipped):
                    continue
                done.add(statement)
                block = self._source.block(statement)
                conditions = self._conditions(region, statement)
                if conditions is None or block in blocks:
                    continue
                blocks.add(block)
                text = f"ampx.unscale({optimizers})"
                self._plan.insert_before(
                    statement, f"if {' and '.join(conditions)}:\n    {text}" if conditions else text
                )

    def _conditions(self, region: cst.With, statement: cst.CSTNode) -> list[str] | None:
        """Give what must hold at a statement for a block to have run before it; None if it cannot have."""
        here = self._tests(statement)
        found = []
        for node, (test, holds) in self._tests(region).items():
            if node in here:
                continue
            known = [truth for other, truth in here.values() if other == test]
            if known and holds not in known:
                return None
            if not known:
                found.append(test if holds else f"not ({test})")
        return found

    def _tests(self, node: cst.CSTNode) -> dict[cst.CSTNode, tuple[str, bool]]:
        return {
            one: (self._source.code(one.test), part is one.body)
            for one, part in self._source.branches(node).items()
            if isinstance(one, cst.If)
        }

    def _clip(self, master: cst.Call) -> bool:
        """Turn the clipping of master parameters by their L2 norm into ampx's; tell whether it was that."""
        call = self._source.parent(self._source.parent(master))
        if not isinstance(call, cst.Call) or _name(call) not in ("clip_grad_norm_", "clip_grad_norm"):
            return False
        found = arguments(call, ("parameters", "max_norm"))
        if found is None or found.keys() != {"parameters", "max_norm"} or found["parameters"] is not master:
            return False
        optimizer = master.args[0].value

        def write(updated: cst.Call) -> cst.BaseExpression:
            made = arguments(updated, ("parameters", "max_norm")) or {}
            bound = self._plan.code(made["max_norm"])
            return self._plan.parse_expression(f"ampx.clip_grad_norm({self._source.code(optimizer)}, {bound})")

        self._plan.edit(call, write)
        return True

    def _until_step(self, region: cst.With) -> list[cst.CSTNode]:
        """Give the statements that run after a block and before the next step or backward, as the text has them."""
        home = self._source.function(region)
        end = max(self._source.order(one) for one in self._source.everything_under(region))
        found: list[cst.CSTNode] = []
        for node in self._source.nodes:
            if self._source.order(node) <= end or self._source.function(node) is not home:
                continue
            if isinstance(node, cst.With) and any(node is other for other, _ in self._scaled):
                if found or self._next_in_block(region) is node:
                    break
                continue
            if isinstance(node, cst.Call) and _name(node) in _STEPS:
                break
            if isinstance(node, (cst.SimpleStatementLine, cst.For)) and not self._nested(node, found):
                found.append(node)
        return found

    def _next_in_block(self, statement: cst.CSTNode) -> cst.CSTNode | None:
        block = self._source.block(statement)
        body: list[cst.CSTNode] = list(getattr(block, "body", ()))
        position = body.index(statement) + 1 if statement in body else len(body)
        return body[position] if position < len(body) else None

    def _nested(self, node: cst.CSTNode, found: Sequence[cst.CSTNode]) -> bool:
        return any(self._source.inside(node, one) for one in found)

    def _looks(self, statement: cst.CSTNode, clipped: set[cst.Call]) -> bool:
        """Tell whether a statement reads gradients, but for ampx's own clipping."""
        for call in self._source.under(statement, cst.Call):
            if _name(call) in _CLIPS:
                return not any(self._source.inside(one, call) for one in clipped)
            if _name(call) in self._readers:
                return True
        return self._reads(statement)

    def _reads(self, node: cst.CSTNode) -> bool:
        attributes = {one.attr.value for one in self._source.under(node, cst.Attribute)}
        calls = {_name(one) for one in self._source.under(node, cst.Call)}
        return "grad" in attributes or bool(calls & (_CLIPS | {"master_params"}))

    def _scales(self, function: cst.FunctionDef) -> bool:
        return any(self._source.inside(region, function) for region, _ in self._scaled)


def _name(call: cst.Call) -> str:
    func = call.func
    return func.attr.value if isinstance(func, cst.Attribute) else func.value if isinstance(func, cst.Name) else ""
