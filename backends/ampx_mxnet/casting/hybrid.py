"""Hybridized blocks follow the switch: a graph that was traced with casting is not used without, nor the reverse.

Native defect: a block that was hybridized and called before `amp.init` computes in float32 for ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

from ampx_mxnet.compat import mx

from .switch import current

# What casts a block's graph was traced with; a block that is not here was traced before casting was switched on.
_traced: Final[weakref.WeakKeyDictionary[Any, object]] = weakref.WeakKeyDictionary()
# The two methods of gluon's hybrid blocks through which all tracing and all calls of traced graphs go.
_METHODS: Final = ("_get_graph", "_call_cached_op")
_originals: dict[str, Callable[..., Any]] = {}


def follow() -> None:
    """Have blocks look at the switch whenever they are called."""
    for name in _METHODS:
        _originals[name] = vars(mx.gluon.HybridBlock)[name]
        setattr(mx.gluon.HybridBlock, name, _looking(_originals[name]))


def unfollow() -> None:
    """Undo `follow`; graphs with casts are forgotten, and traced anew when their block is called."""
    for name, original in list(_originals.items()):
        setattr(mx.gluon.HybridBlock, name, original)
        del _originals[name]
    for block, plan in list(_traced.items()):
        if plan is not None:
            block._clear_cached_op()
    _traced.clear()


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def looking(block: Any, *args: Any) -> Any:
        # A symbol block has a graph that was never traced; amp.convert_hybrid_block gives it casts.
        if not isinstance(block, mx.gluon.SymbolBlock):
            plan = current()
            if _traced.get(block) != plan:
                block._clear_cached_op()
                _traced[block] = plan
        return method(block, *args)

    return looking
