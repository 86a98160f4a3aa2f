"""Hybridized blocks follow the switch: a graph that was traced with casting is not used without, nor the reverse.

Native defect: a block that was hybridized and called before `amp.init` computes in float32 for ever. One that was
imported does so always: its graph was never traced. MXNet's own conversion of symbols gives it casts here.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from typing import Any, Final

from ampx.backend import CastPlan
from ampx_mxnet.compat import amp, mx

from . import oplists
from .switch import current

# What casts a block's graph was traced with; a block that is not here was traced before casting was switched on.
_traced: Final[weakref.WeakKeyDictionary[Any, object]] = weakref.WeakKeyDictionary()
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
# The graphs that symbol blocks were made with, of those that were given others.
_imported: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()


def follow() -> None:
    """Have blocks look at the switch whenever they are called."""
    # The methods of gluon's hybrid blocks through which all tracing and all calls of traced graphs go.
    for owner, name, looking in (
        (mx.gluon.HybridBlock, "_get_graph", _looking),
        (mx.gluon.HybridBlock, "_call_cached_op", _looking),
        (mx.gluon.SymbolBlock, "forward", _converting),
    ):
        _originals[owner, name] = vars(owner)[name]
        setattr(owner, name, looking(vars(owner)[name]))


def unfollow() -> None:
    """Undo `follow`; graphs with casts are forgotten, and traced anew when their block is called."""
    for (owner, name), original in list(_originals.items()):
        setattr(owner, name, original)
        del _originals[owner, name]
    for block in list(_imported):
        _convert(block, None)
    _imported.clear()
    for block, plan in list(_traced.items()):
        if plan is not None:
            block._clear_cached_op()
    _traced.clear()


def nodes(symbol: Any) -> list[dict[str, Any]]:
    """Return the operators and inputs of a graph, casts included, as MXNet writes them down."""
    content: list[dict[str, Any]] = json.loads(symbol.tojson(remove_amp_cast=False))["nodes"]
    return content


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def looking(block: Any, *args: Any) -> Any:
        if not isinstance(block, mx.gluon.SymbolBlock):
            plan = current()
            if _traced.get(block) != plan:
                block._clear_cached_op()
                _traced[block] = plan
        return method(block, *args)

    return looking


def _converting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def converting(block: Any, *args: Any) -> Any:
        plan = current()
        if _traced.get(block) != plan:
            _convert(block, plan)
            _traced[block] = plan
        return forward(block, *args)

    return converting


def _convert(block: Any, plan: CastPlan | None) -> None:
    """Put the casts of a plan into the graph that a symbol block was made with; None puts that graph back."""
    inputs, graph = block._cached_graph
    graph = original = _imported.get(block, graph)
    casts = any(node["op"] == "amp_cast" for node in nodes(original))
    # One that was converted before has its casts, and most operators in NumPy's manner take no low precision.
    if plan is not None and not casts and not isinstance(original, mx.sym.np._Symbol):
        _imported[block] = original
        with oplists.corrected():
            graph = amp.convert_symbol(original, plan.dtype, **oplists.conversion(plan))
    block._clear_cached_op()
    block._cached_graph = inputs, graph
