"""The dialect of `paddle.fluid.contrib.mixed_precision`, for static graphs of Paddle 1.

Fluid is gone from Paddle as a whole, so that rewriting one call would not make a script run. What it trains with is
`ampx_paddle.fluid`, whose `decorate` is ampx's; the script only has to install it before its imports.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from ampx.syntax.program import Program, Reference, import_key

from .edits import Plan
from .report import NeedsHumanError

ROOTS: Final = ("paddle.fluid.contrib.mixed_precision",)
EAGER: Final = ("paddle.fluid.dygraph.AmpScaler", "paddle.fluid.dygraph.amp_guard", "paddle.fluid.dygraph.amp")
# What `ampx_paddle.fluid.contrib.mixed_precision` has.
OFFERED: Final = frozenset(
    f"{ROOTS[0]}{name}"
    for name in (
        "",
        ".decorate",
        ".decorator",
        ".decorator.decorate",
        ".decorator.OptimizerWithMixedPrecision",
        ".AutoMixedPrecisionLists",
        ".fp16_lists",
        ".fp16_lists.AutoMixedPrecisionLists",
        ".fp16_lists.CustomOpLists",
    )
)
_MODULE: Final = "ampx_paddle.fluid"


def rewrite(plan: Plan) -> None:
    """Plan everything."""
    for source in plan.program.sources:
        _rewrite_file(plan, source.tree)


def _check_offered(program: Program, names: Sequence[tuple[Reference, str]]) -> None:
    """Refuse names of fluid that the alias does not have."""
    for node, name in names:
        if name.startswith(EAGER):
            raise NeedsHumanError(
                node,
                f"`{program.code(node)}` is fluid's eager mode",
                "Write `paddle.amp` or ampx by hand: the manual's page on PaddlePaddle shows how.",
            )
        if name.startswith(ROOTS) and name not in OFFERED:
            raise NeedsHumanError(
                node,
                f"`{name}` is not in `ampx_paddle.fluid`",
                "Train with `decorate`, or write `paddle.amp` by hand: the manual's page on PaddlePaddle shows how.",
            )


def _imports_of_fluid(program: Program, tree: ast.Module) -> list[ast.stmt]:
    """Return the imports of fluid: those at the top level, where there are such."""
    lines = [
        statement
        for statement in program.imports(tree)
        if any(f"{import_key(statement, alias)[1]}.".startswith("paddle.fluid.") for alias in statement.names)
    ]
    return [statement for statement in lines if program.parent(statement) is tree] or list(lines)


def _is_installed(program: Program, tree: ast.Module) -> bool:
    return any(alias.name == _MODULE for statement in program.imports(tree) for alias in statement.names)


def _rewrite_file(plan: Plan, tree: ast.Module) -> None:
    program = plan.program
    names = [(node, name) for node, name in program.references(tree) if name.startswith("paddle.fluid.")]
    _check_offered(program, names)
    uses = [node for node, name in names if name.startswith(ROOTS)]
    if not uses or _is_installed(program, tree):
        return
    lines = _imports_of_fluid(program, tree)
    if not lines:
        raise NeedsHumanError(uses[0], "fluid is used and not imported here", "Import `ampx_paddle.fluid` by hand.")
    edits = plan.of(tree)
    edits.insert_before(lines[0], f"import {_MODULE}\n\n{_MODULE}.install()")
    edits.tell(
        uses[0],
        "note",
        "paddle.fluid is gone from Paddle; `ampx_paddle.fluid` takes its place",
        "It has what static-graph training with mixed precision uses, and refuses the rest by name.",
    )
