"""The conversions of `mxnet.contrib.amp`, by its names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampx.errors import UnsupportedByBackendError

from . import convert
from .amp_lists import dtype_of, native_lists
from .oplists import NativeLists


def convert_symbol(
    sym: Any,
    target_dtype: object = None,
    target_dtype_ops: Sequence[str] | None = None,
    fp32_ops: Sequence[str] | None = None,
    conditional_fp32_ops: Sequence[tuple[str, str, Sequence[str]]] | None = None,
    excluded_sym_names: Sequence[str] = (),
    data_names: Sequence[str] | None = None,
    cast_optional_params: bool = False,
) -> Any:
    """Convert a float32 symbol, with MXNet's own conversion.

    Args:
        sym: The symbol.
        target_dtype: As in `init`.
        target_dtype_ops: As `target_precision_ops` of `init`.
        fp32_ops: As in `init`.
        conditional_fp32_ops: As in `init`.
        excluded_sym_names: Names of nodes to leave in float32.
        data_names: Names of the inputs that are data, not parameters; None: those that MXNet takes for them.
        cast_optional_params: Give parameters the target dtype where only operators in that dtype use them.

    Returns:
        The symbol with casts.

    Raises:
        UnsupportedDtypeError, UnsupportedOpError, InvalidOptionError: As `ampx_mxnet.convert.convert_model`.
    """
    return convert.convert_symbol(
        sym,
        _dtype(target_dtype),
        allow=_allow(target_dtype_ops, fp32_ops, conditional_fp32_ops),
        exclude=excluded_sym_names or (),
        data_names=data_names,
        cast_parameters=cast_optional_params,
    )


def convert_model(
    sym: Any,
    arg_params: dict[str, Any],
    aux_params: dict[str, Any],
    target_dtype: object = None,
    target_dtype_ops: Sequence[str] | None = None,
    fp32_ops: Sequence[str] | None = None,
    conditional_fp32_ops: Sequence[tuple[str, str, Sequence[str]]] | None = None,
    excluded_sym_names: Sequence[str] = (),
    cast_optional_params: bool = False,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Convert a float32 symbol and its parameters; see `ampx_mxnet.convert.convert_model`.

    Returns:
        Symbol, parameters and auxiliary states; what was passed stays as it was.

    Raises:
        UnsupportedDtypeError, UnsupportedOpError, InvalidOptionError: As there.
    """
    return convert.convert_model(
        sym,
        arg_params,
        aux_params,
        _dtype(target_dtype),
        allow=_allow(target_dtype_ops, fp32_ops, conditional_fp32_ops),
        exclude=excluded_sym_names or (),
        cast_parameters=cast_optional_params,
    )


def convert_hybrid_block(
    block: Any,
    target_dtype: object = None,
    target_dtype_ops: Sequence[str] | None = None,
    fp32_ops: Sequence[str] | None = None,
    conditional_fp32_ops: Sequence[tuple[str, str, Sequence[str]]] | None = None,
    excluded_sym_names: Sequence[str] = (),
    ctx: Any = None,
    cast_optional_params: bool = False,
) -> Any:
    """Convert a hybridized float32 block; see `ampx_mxnet.convert.convert_hybrid_block`.

    Args:
        block: A block that was hybridized and called.
        target_dtype: As in `init`.
        target_dtype_ops: As `target_precision_ops` of `init`.
        fp32_ops: As in `init`.
        conditional_fp32_ops: As in `init`.
        excluded_sym_names: Names of nodes to leave in float32.
        ctx: Where the new block's parameters are; None for where the block's are.
        cast_optional_params: Store parameters in the target dtype where only operators in that dtype use them.

    Returns:
        A block for inference.

    Raises:
        UnsupportedDtypeError, UnsupportedOpError, InvalidOptionError: As there.
    """
    converted = convert.convert_hybrid_block(
        block,
        _dtype(target_dtype),
        allow=_allow(target_dtype_ops, fp32_ops, conditional_fp32_ops),
        exclude=excluded_sym_names or (),
        cast_parameters=cast_optional_params,
    )
    if ctx is not None:
        converted.collect_params().reset_ctx(ctx)
    return converted


def convert_bucketing_module(*args: Any, **kwargs: Any) -> Any:
    """Refuse: only symbols, models and hybrid blocks are converted.

    Raises:
        UnsupportedByBackendError: Always.
    """
    raise UnsupportedByBackendError(
        "convert_bucketing_module is not offered by ampx_mxnet.amp; accepted: convert_symbol, convert_model and "
        "convert_hybrid_block. Convert the symbol of each bucket in the module's sym_gen."
    )


def _dtype(target_dtype: object) -> str | None:
    return None if target_dtype is None else dtype_of(target_dtype)


def _allow(
    target_dtype_ops: Sequence[str] | None,
    fp32_ops: Sequence[str] | None,
    conditional_fp32_ops: Sequence[tuple[str, str, Sequence[str]]] | None,
) -> list[NativeLists]:
    lists = native_lists(target_dtype_ops, fp32_ops, conditional_fp32_ops)
    return [] if lists == NativeLists() else [lists]
