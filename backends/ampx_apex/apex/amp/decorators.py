"""Functions that say in which dtype they want their arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ampx.annotate import Function, Kind
from ampx.api import casting_of
from ampx.backend import CastPlan
from ampx_torch import casting, trees
from ampx_torch.trees import LOW

from ._amp_state import _amp_state


def annotate(function: Function, kind: Kind) -> Function:
    """Return a function whose floating arguments are cast while operations are cast.

    The kind `"half"` casts to low precision, `"float"` to float32, also inside, where apex went on casting, and
    `"promote"` to the widest dtype among the arguments.
    """

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        plan = casting_plan(args, kwargs)
        if plan is None:
            return function(*args, **kwargs)
        dtype = _target(kind, plan, (args, kwargs))
        args, kwargs = trees.cast(args, dtype, plan.device), trees.cast(kwargs, dtype, plan.device)
        if kind == "float":
            with casting.off(plan.device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return inside  # type: ignore[return-value]


def _target(kind: Kind, plan: CastPlan, arguments: Any) -> torch.dtype:
    low = trees.DTYPES[plan.dtype]
    if kind == "half":
        return low
    wide = kind == "float" or any(tensor.dtype not in LOW for tensor in trees.floating(arguments))
    return torch.float32 if wide else low


def casting_plan(*arguments: Any) -> CastPlan | None:
    """Return the plan by which operations are cast at this moment in this thread; None where they are not.

    The session may be one that the script started by `ampx.init`, where a library annotates its functions.
    """
    backend, plan = casting_of(arguments, {}) or (None, None)
    if backend is None or backend.name != "torch":
        plan = None if _amp_state.session is None else _amp_state.session.casting
    if plan is None or plan.level != "O1" or not casting.is_on(plan.device):
        return None
    return plan
