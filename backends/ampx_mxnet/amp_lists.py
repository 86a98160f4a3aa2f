"""The op lists of `mxnet.contrib.amp`, by its names, and what its functions take as lists and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampx.errors import InvalidOptionError
from ampx.policy import Dtype, normalise_dtype

from .compat import amp as _native
from .dtypes import BFLOAT16, DTYPES
from .oplists import NativeLists

# Operator, argument, and the argument's values with which it computes in float32.
Condition = tuple[str, str, Sequence[str]]


def dtype_of(target_dtype: object) -> Dtype:
    """Read a dtype in any spelling of MXNet's: a name, a NumPy dtype or type, MXNet's own bfloat16.

    Raises:
        UnsupportedDtypeError: It is none that is known.
    """
    return "bfloat16" if target_dtype == BFLOAT16 else normalise_dtype(target_dtype)


def native_lists(
    target: Sequence[str] | None, fp32: Sequence[str] | None, conditional: Sequence[Condition] | None
) -> NativeLists:
    """Read the lists as `amp.init` takes them; None keeps MXNet's.

    Raises:
        InvalidOptionError: One is no list.
    """
    for name, given in (("operators", target), ("fp32_ops", fp32), ("conditional_fp32_ops", conditional)):
        if isinstance(given, str):
            raise InvalidOptionError(f"{name} got {given!r}; accepted: a list of names. Pass [{given!r}].")
    found = None
    if conditional is not None:
        found = tuple((name, argument, tuple(values)) for name, argument, values in conditional)
    return NativeLists(None if target is None else tuple(target), None if fp32 is None else tuple(fp32), found)


def _native_dtype(target_dtype: object) -> Any:
    found = dtype_of(target_dtype)
    return found if found == "float16" else DTYPES[found]


def list_lp16_ops(target_dtype: object = "float16") -> list[str]:
    """List the operators that MXNet computes in low precision."""
    return list(_native.list_lp16_ops(_native_dtype(target_dtype)))


def list_fp16_ops() -> list[str]:
    """List the operators that MXNet computes in float16, by the name that MXNet 1.5 had for it."""
    return list_lp16_ops("float16")


def list_fp32_ops(target_dtype: object = "float16") -> list[str]:
    """List the operators that MXNet computes in float32."""
    return list(_native.list_fp32_ops(_native_dtype(target_dtype)))


def list_lp16_fp32_ops(target_dtype: object = "float16") -> list[str]:
    """List the operators that compute in the dtype of their inputs."""
    return list(_native.list_lp16_fp32_ops(_native_dtype(target_dtype)))


def list_fp16_fp32_ops() -> list[str]:
    """List the operators that compute in the dtype of their inputs, by the name that MXNet 1.5 had for it."""
    return list_lp16_fp32_ops("float16")


def list_conditional_fp32_ops(target_dtype: object = "float16") -> list[tuple[str, str, list[str]]]:
    """List the operators that MXNet computes in float32 with some values of an argument."""
    return list(_native.list_conditional_fp32_ops(_native_dtype(target_dtype)))


def list_widest_type_cast(target_dtype: object = "float16") -> list[str]:
    """List the operators whose inputs get the widest dtype among them."""
    return list(_native.list_widest_type_cast(_native_dtype(target_dtype)))


def list_loss_output_functions(target_dtype: object = "float16") -> list[str]:
    """List the operators that make a loss themselves; they are refused while casting is on."""
    return list(_native.list_loss_output_functions(_native_dtype(target_dtype)))


def list_lp16_use_fp32_params(target_dtype: object = "float16") -> Any:
    """Return which inputs of low-precision operators stay in float32; None where MXNet has no such list."""
    return _native.list_lp16_use_fp32_params(_native_dtype(target_dtype))
