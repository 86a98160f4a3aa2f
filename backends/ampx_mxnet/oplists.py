"""The op lists of MXNet's amp, changed as `allow` and `deny` say."""

from __future__ import annotations

import inspect
from typing import Any

from ampx.contract import CastPlan
from ampx.errors import UnsupportedOpError

from .compat import amp, mx
from .dtypes import DTYPES


def check_plan(plan: CastPlan) -> CastPlan:
    """Turn the entries of allow and deny into names of MXNet's operators.

    Raises:
        UnsupportedOpError: An entry is neither an operator nor its name, or stands in both lists.

    Sync: none.
    """
    if not plan.allow and not plan.deny:
        return plan
    known = {name: function for name in mx.operator.get_all_registered_operators() if (function := _function(name))}
    allow = tuple(_operator(entry, known) for entry in plan.allow)
    deny = tuple(_operator(entry, known) for entry in plan.deny)
    if both := sorted(set(allow) & set(deny)):
        raise UnsupportedOpError(
            f"allow and deny both name {', '.join(both)}; accepted: each in one list. Remove it from one."
        )
    return CastPlan(plan.device, plan.dtype, plan.level, allow, deny)


def _operator(entry: Any, known: dict[str, tuple[Any, ...]]) -> str:
    if isinstance(entry, str) and entry in known:
        return entry
    if inspect.isfunction(entry):
        wanted = inspect.unwrap(entry)  # while casting is on, mx.nd.dot is the function that chooses
        for name, functions in known.items():
            if any(inspect.unwrap(one) is wanted for one in functions):
                return name
    raise UnsupportedOpError(
        f"{entry!r} is no operator of mxnet; accepted: names such as 'FullyConnected', or functions such as "
        f"mx.nd.FullyConnected. Pass one of these."
    )


def _function(name: str) -> tuple[Any, ...]:
    """Give an operator's functions for arrays and symbols; none for an operator without both."""
    found = []
    for module in (mx.ndarray, mx.symbol):
        submodules = {prefix: getattr(module, prefix[1:-1]) for prefix in mx.base._OP_NAME_PREFIX_LIST}
        short, place = amp.amp._get_fun_to_wrap(name, module, submodules)
        if not inspect.isfunction(getattr(place, short, None)):
            return ()
        found.append(getattr(place, short))
    return tuple(found)


def lists(plan: CastPlan) -> dict[str, list[Any]]:
    """Give what `amp.init` takes as its lists. Sync: none."""
    dtype = plan.dtype if plan.dtype == "float16" else DTYPES[plan.dtype]
    low, wide = set(plan.allow), set(plan.deny)
    return {
        "target_precision_ops": [*(name for name in amp.list_lp16_ops(dtype) if name not in wide | low), *plan.allow],
        "fp32_ops": [*(name for name in amp.list_fp32_ops(dtype) if name not in wide | low), *plan.deny],
        "conditional_fp32_ops": [entry for entry in amp.list_conditional_fp32_ops(dtype) if entry[0] not in wide | low],
    }
