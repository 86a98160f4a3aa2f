"""The op lists of MXNet's amp, changed as `allow` and `deny` say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from ampx.backend import CastPlan, is_module
from ampx.errors import UnsupportedOpError, meant
from ampx_mxnet.compat import amp, mx
from ampx_mxnet.dtypes import DTYPES

# Native defect: MXNet's lists let these compute in bfloat16 where their inputs are, as in every attention, or do not
# name them. On a CPU they have no kernel for it; the remainder has one that loses the gradient of the divisor.
_WITHOUT_BFLOAT16: Final = (
    *("dot", "batch_dot", "_sparse_dot"),
    *(f"_contrib_interleaved_matmul_{part}" for part in ("selfatt_qk", "selfatt_valatt", "encdec_qk", "encdec_valatt")),
    *(f"_contrib_box_{verb}" for verb in ("decode", "encode", "iou", "nms", "non_maximum_suppression")),
    *(f"_contrib_MultiBox{part}" for part in ("Detection", "Prior", "Target")),
    *(f"_contrib_{name}" for name in ("MultiProposal", "PSROIPooling", "Proposal", "ROIAlign", "RROIAlign")),
    *("_contrib_ModulatedDeformableConvolution", "Correlation", "col2im", "im2col"),
    *("_Mod", "_mod", "broadcast_mod"),
)


@dataclass(frozen=True)
class NativeLists:
    """An entry of `allow` that replaces MXNet's lists, as arguments of MXNet's `amp.init` do; None keeps its own."""

    target: tuple[str, ...] | None = None  # names of operators to compute in low precision
    fp32: tuple[str, ...] | None = None  # names of operators to compute in float32
    # Operator, argument, and the argument's values with which it computes in float32.
    conditional: tuple[tuple[str, str, tuple[str, ...]], ...] | None = None

    def names(self) -> list[str]:
        """List all operators that are named."""
        return [*(self.target or ()), *(self.fp32 or ()), *(entry[0] for entry in self.conditional or ())]


def named(plan: CastPlan) -> set[str]:
    """Return the names of operators in a checked plan."""
    names = {entry for entry in (*plan.allow, *plan.deny) if isinstance(entry, str) and not is_module(entry)}
    return names.union(*(lists.names() for lists in _native(plan)))


def _native(plan: CastPlan) -> list[NativeLists]:
    return [entry for entry in plan.allow if isinstance(entry, NativeLists)]


def check_plan(plan: CastPlan) -> CastPlan:
    """Turn the entries of allow and deny into names of MXNet's operators."""
    if not plan.allow and not plan.deny:
        return plan
    operators = {
        name: functions for name in mx.operator.get_all_registered_operators() if (functions := _functions(name))
    }
    native = _native(plan)
    for lists in native:
        for name in lists.names():
            _operator(name, operators)
        _check_disjoint("target_precision_ops and fp32_ops", lists.target or (), lists.fp32 or ())
    allow = tuple(_operator(entry, operators) for entry in plan.allow if not isinstance(entry, NativeLists))
    deny = tuple(_operator(entry, operators) for entry in plan.deny)
    _check_disjoint("allow and deny", allow, deny)
    return replace(plan, allow=(*allow, *native), deny=deny)


def _check_disjoint(which: str, first: Iterable[str], second: Iterable[str]) -> None:
    if both := sorted(set(first) & set(second)):
        raise UnsupportedOpError(
            f"{which} both name {', '.join(both)}; accepted: each in one list. Remove it from one."
        )


def _operator(entry: Any, operators: dict[str, tuple[Any, ...]]) -> str:
    if is_module(entry) or (isinstance(entry, str) and entry in operators):
        return str(entry)
    if inspect.isfunction(entry):
        wanted = inspect.unwrap(entry)  # while casting is on, mx.nd.dot is the function that chooses
        for name, functions in operators.items():
            if any(inspect.unwrap(function) is wanted for function in functions):
                return name
    raise UnsupportedOpError(
        f"{entry!r} is no operator of mxnet; accepted: names such as 'FullyConnected', or functions such as "
        f"mx.nd.FullyConnected. Pass one of these.{meant(entry, operators)}"
    )


def _functions(name: str) -> tuple[Any, ...]:
    """Return an operator's functions for arrays and symbols; none for an operator without both."""
    functions = []
    for module in (mx.ndarray, mx.symbol):
        submodules = {prefix: getattr(module, prefix[1:-1]) for prefix in mx.base._OP_NAME_PREFIX_LIST}
        short, place = amp.amp._get_fun_to_wrap(name, module, submodules)
        if not inspect.isfunction(getattr(place, short, None)):
            return ()
        functions.append(getattr(place, short))
    return tuple(functions)


@functools.cache
def _takes_arrays(name: str) -> bool:
    return any("NDArray" in kind for kind in mx.operator.get_operator_arguments(name).types)


@contextmanager
def corrected() -> Iterator[None]:
    """Return a region in which MXNet's own lists for bfloat16 keep operators in float32 that have no kernel for it.

    Native defect: they also name operators that take no arrays, such as `zeros`, of which a recurrent layer makes its
    first state; to cast the inputs of their symbols raises a TypeError.
    """
    native = amp.lists.symbol_bf16
    before = native.FP32_FUNCS, native.WIDEST_TYPE_CASTS
    try:
        native.FP32_FUNCS = [*filter(_takes_arrays, before[0]), *_WITHOUT_BFLOAT16]
        native.WIDEST_TYPE_CASTS = [name for name in before[1] if name not in _WITHOUT_BFLOAT16]
        yield
    finally:
        native.FP32_FUNCS, native.WIDEST_TYPE_CASTS = before


def lists(plan: CastPlan) -> dict[str, list[Any]]:
    """Return what `amp.init` takes as its lists."""
    target, fp32, conditional = _native_lists(plan)
    low = [entry for entry in plan.allow if isinstance(entry, str) and not is_module(entry)]
    wide = [entry for entry in plan.deny if not is_module(entry)]
    moved = {*low, *wide}
    return {
        "target_precision_ops": [*(name for name in target if name not in moved), *low],
        "fp32_ops": [*(name for name in fp32 if name not in moved), *wide],
        "conditional_fp32_ops": [entry for entry in conditional if entry[0] not in moved],
    }


def _native_lists(plan: CastPlan) -> tuple[list[Any], list[Any], list[Any]]:
    """Return MXNet's lists for a dtype, or those that stand in their place."""
    dtype = plan.dtype if plan.dtype == "float16" else DTYPES[plan.dtype]
    target, fp32 = amp.list_lp16_ops(dtype), amp.list_fp32_ops(dtype)
    conditional = amp.list_conditional_fp32_ops(dtype)
    for native in _native(plan):
        # What a list names leaves the others, which MXNet would otherwise apply on top.
        if native.target is not None:
            target, fp32 = native.target, [name for name in fp32 if name not in native.target]
        if native.fp32 is not None:
            fp32, target = native.fp32, [name for name in target if name not in native.fp32]
        if native.conditional is not None:
            conditional = [(name, argument, list(values)) for name, argument, values in native.conditional]
    return target, fp32, conditional


def conversion(plan: CastPlan) -> dict[str, list[Any]]:
    """Return what MXNet's conversion of symbols takes as its lists.

    Raises:
        UnsupportedOpError: The plan names an operator to or from which MXNet inserts no casts.
    """
    dtype = DTYPES[plan.dtype]
    cast = {name for names in (amp.list_lp16_ops, amp.list_fp32_ops, amp.list_lp16_fp32_ops) for name in names(dtype)}
    cast.update(entry[0] for entry in amp.list_conditional_fp32_ops(dtype))
    if uncast := sorted(named(plan) - cast):
        raise UnsupportedOpError(
            f"MXNet converts no {', '.join(uncast)} to or from {plan.dtype}; accepted: operators of the lists that "
            f"mxnet.contrib.amp gives for it, such as {', '.join(sorted(cast)[:5])}. Remove it."
        )
    operators = lists(plan)
    return {"target_dtype_ops": operators.pop("target_precision_ops"), **operators}
