"""Paddle's auto_cast, as regions and for a whole thread; and casting of trees."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import paddle
from paddle.amp.auto_cast import amp_global_state
from paddle.incubate.autograd.phi_ops_map import op_map

from ampx.contract import CastPlan
from ampx.errors import UnsupportedOpError
from ampx.policy import Dtype

# In `deny`: whatever Paddle's own allow list does not name computes in float32. Paddle calls that level OD.
EVERYTHING_ELSE: Final = "*"
DTYPES: Final = {"float16": paddle.float16, "bfloat16": paddle.bfloat16, "float32": paddle.float32}


class _Active(threading.local):
    """The regions that `activate` entered: Paddle keeps its switch by thread."""

    region: AbstractContextManager[Any] | None = None


_active = _Active()


def check_plan(plan: CastPlan) -> CastPlan:
    """Turn the entries of allow and deny into names of Paddle's operators; `"*"` in deny stays, at O1.

    Raises:
        UnsupportedOpError: An entry is neither an operator nor its name, or stands in both lists.

    Sync: none.
    """
    rest = EVERYTHING_ELSE in plan.deny
    allow = tuple(map(_operator, plan.allow))
    deny = tuple(_operator(one) for one in plan.deny if one != EVERYTHING_ELSE)
    if both := sorted(set(allow) & set(deny)):
        raise UnsupportedOpError(
            f"allow and deny both name {', '.join(both)}; accepted: each in one list. Remove it from one."
        )
    if rest and plan.level == "O2":
        raise UnsupportedOpError(
            "deny got '*' at level='O2', where parameters are low precision; accepted: '*' at O1. Use level='O1', or "
            "name the operators."
        )
    return CastPlan(plan.device, plan.dtype, plan.level, allow, (*deny, EVERYTHING_ELSE) if rest else deny)


def _public_name(function: Any) -> str | None:
    # Not `__name__`: that of paddle.matmul is "_matmul".
    for module in (paddle, paddle.nn.functional):
        for name, value in vars(module).items():
            if value is function and hasattr(paddle._C_ops, name):
                return name
    return None


def _operator(entry: Any) -> str:
    """Give the name by which `auto_cast` knows an operator.

    Native defect: `auto_cast` takes any names, but compares those that operators had in Paddle 1 ("matmul_v2"); others,
    such as "matmul", change nothing.
    """
    name = entry if isinstance(entry, str) else _public_name(entry)
    if name in ("linear", "linear_v2"):
        return _linear()
    if name is not None and hasattr(paddle._C_ops, name):
        return _former_names().get(name, name)
    if isinstance(entry, str) and entry in op_map:
        return entry
    raise UnsupportedOpError(
        f"{entry!r} is no operator of paddle; accepted: names such as 'matmul', functions such as paddle.matmul, "
        f"and '*' in deny. Pass one of these."
    )


def _linear() -> str:
    if paddle.is_compiled_with_cuda():
        return "linear_v2"
    raise UnsupportedOpError(
        "'linear' is no operator of its own in this build of paddle, which computes it as a product and a sum; "
        "accepted: their names. Pass 'matmul' or 'add'."
    )


@functools.cache
def _former_names() -> dict[str, str]:
    """Give the name in Paddle 1 of every operator that had another one. Sync: none."""
    described: dict[str, dict[str, Any]] = op_map
    return {value["phi_name"]: former for former, value in described.items() if "phi_name" in value}


@contextmanager
def region(plan: CastPlan, enabled: bool) -> Iterator[None]:
    """Give a region with casting on or off. Sync: none."""
    options: dict[str, Any] = {"enable": False}
    if enabled:
        rest = EVERYTHING_ELSE in plan.deny
        options = {
            "custom_white_list": set(plan.allow) or None,
            "custom_black_list": set(plan.deny) - {EVERYTHING_ELSE} or None,
            "level": "OD" if rest else plan.level,
        }
    with _dtype_restored(), paddle.amp.auto_cast(dtype=plan.dtype, **options):
        yield


@contextmanager
def off() -> Iterator[None]:
    """Give a region with casting off, whatever the plan. Sync: none."""
    with _dtype_restored(), paddle.amp.auto_cast(enable=False):
        yield


@contextmanager
def _dtype_restored() -> Iterator[None]:
    # Native defect: auto_cast leaves its dtype behind in a variable of the process, which Paddle's GradScaler obeys.
    state = amp_global_state()
    before = state.amp_dtype
    try:
        yield
    finally:
        state.amp_dtype = before


def activate(plan: CastPlan) -> None:
    """Switch casting on in the calling thread until `deactivate`; a region entered before is left first. Sync: none."""
    deactivate()
    entered = region(plan, True)
    entered.__enter__()
    _active.region = entered


def deactivate() -> None:
    """Leave the region that `activate` entered, if there is one. Sync: none."""
    entered, _active.region = _active.region, None
    if entered is not None:
        entered.__exit__(None, None, None)


def cast(tree: Any, dtype: Dtype) -> Any:
    """Cast the floating tensors of a tree, keeping its shape and types; the rest is returned as it is. Sync: none."""
    if isinstance(tree, paddle.Tensor):
        wanted = DTYPES[dtype]
        return tree.astype(wanted) if tree.is_floating_point() and tree.dtype != wanted else tree
    if isinstance(tree, Mapping):
        kind: Any = type(tree)
        return kind({key: cast(value, dtype) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        values = [cast(value, dtype) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def widest(tree: Any, at_least: Dtype) -> Dtype:
    """Give float32 if any floating tensor of a tree is wider than `at_least`. Sync: none."""
    return at_least if all(one.dtype == DTYPES[at_least] for one in _floating(tree)) else "float32"


def _floating(tree: Any) -> Iterator[paddle.Tensor]:
    if isinstance(tree, paddle.Tensor):
        if tree.is_floating_point():
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _floating(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _floating(value)
