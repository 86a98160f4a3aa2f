"""Rules about modules, `"module:name"` in allow and deny: traced graphs of hybridized blocks have the casts in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from ampx.backend import CastPlan, map_leaves
from ampx.modules import FORCES, Names, is_meant, last_match, module_dtypes
from ampx_mxnet import dtypes
from ampx_mxnet.calls import calls, named
from ampx_mxnet.compat import mx

from . import switch


def modules_ruled(plan: CastPlan) -> AbstractContextManager[None]:
    """Return a region in which the rules of a plan about modules are in force."""
    return calls.around((FORCES, _Rules(plan))) if module_dtypes(plan) else nullcontext()


class _Rules:
    """Casts blocks by their names, where casting is on."""

    def __init__(self, plan: CastPlan) -> None:
        self._plan = plan
        self._names = Names(None, named, kinds=(mx.gluon.Block,))
        self._dtype_of = partial(last_match, dtypes=module_dtypes(plan), matches=is_meant)
        self._thread = threading.local()

    def call(self, block: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute a block as the last rule about it says; one that is allowed in one that is denied is cast again."""
        dtype: Any = self._names.dtype(block, self._dtype_of)
        denied = getattr(self._thread, "denied", False)
        if dtype is None or not (denied or switch.current() is not None):
            return forward(*inputs, **options)
        with switch.Region(None):
            inputs = map_leaves(inputs, lambda leaf: _cast(leaf, dtype))
        self._thread.denied = dtype == "float32"
        try:
            with switch.Region(None if dtype == "float32" else self._plan):
                return forward(*inputs, **options)
        finally:
            self._thread.denied = denied


def _cast(leaf: Any, dtype: Any) -> Any:
    if isinstance(leaf, mx.sym.Symbol):
        return mx.sym.amp_cast(leaf, dtype=dtypes.DTYPES[dtype])
    return dtypes.cast(leaf, dtype)
