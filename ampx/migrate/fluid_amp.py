"""The dialect of `paddle.fluid.contrib.mixed_precision`, for static graphs of Paddle 1.

Fluid is gone from Paddle as a whole, so that rewriting one call would not make a script run. What it trains with is
`ampx_paddle.fluid`, whose `decorate` is ampx's; the script only has to install it before its imports.
"""

from __future__ import annotations

from typing import Final

import libcst as cst

from .plan import Plan

ROOTS: Final = ("paddle.fluid.contrib.mixed_precision",)
_MODULE: Final = "ampx_paddle.fluid"
_EAGER: Final = ("paddle.fluid.dygraph.AmpScaler", "paddle.fluid.dygraph.amp_guard", "paddle.fluid.dygraph.amp")


def rewrite(plan: Plan) -> None:
    """Plan everything.

    Raises:
        NeedsHumanError: There is no import of fluid to put the installation before.
    """
    source = plan.source
    found = [(node, name) for node, name in source.references() if name.startswith("paddle.fluid.")]
    for node, name in found:
        if name.startswith(_EAGER):
            raise plan.block(
                node,
                f"`{source.code(node)}` is fluid's eager mode",
                "Write `paddle.amp` or ampx by hand: the manual's page on PaddlePaddle shows how.",
            )
    uses = [node for node, name in found if name.startswith(ROOTS)]
    if not uses or _MODULE in {name for node in source.every(cst.ImportAlias) if (name := node.evaluated_name)}:
        return
    lines = [one for one in source.every(cst.SimpleStatementLine) if _imports_fluid(one)]
    if not lines:
        raise plan.block(uses[0], "fluid is used and not imported here", "Import `ampx_paddle.fluid` by hand.")
    top = [one for one in lines if source.block(one) is source.module]
    plan.insert_before((top or lines)[0], f"import {_MODULE}\n\n{_MODULE}.install()")
    plan.tell(
        uses[0],
        "note",
        "paddle.fluid is gone from Paddle; `ampx_paddle.fluid` takes its place",
        "It has what static-graph training with mixed precision uses, and refuses the rest by name.",
    )


def _imports_fluid(line: cst.SimpleStatementLine) -> bool:
    small = line.body[0]
    if isinstance(small, cst.Import):
        return any(one.evaluated_name.startswith("paddle.fluid") for one in small.names)
    if not isinstance(small, cst.ImportFrom) or small.module is None or small.relative:
        return False
    module = cst.helpers.get_full_name_for_node(small.module) or ""
    names = [] if isinstance(small.names, cst.ImportStar) else [one.evaluated_name for one in small.names]
    return module.startswith("paddle.fluid") or (module == "paddle" and "fluid" in names)
