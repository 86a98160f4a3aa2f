"""Trained float32 models for inference in low precision: MXNet's own conversion of symbols and hybridized blocks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ampx.backend import CastPlan
from ampx.errors import InvalidOptionError, UnsupportedDtypeError
from ampx.policy import Dtype, normalise_dtype

from . import devices
from .casting import oplists
from .compat import amp, mx
from .dtypes import DTYPES


@oplists.corrected()
def convert_model(
    symbol: mx.sym.Symbol,
    arg_params: Mapping[str, mx.nd.NDArray],
    aux_params: Mapping[str, mx.nd.NDArray],
    dtype: str | None = None,
    *,
    allow: Sequence[Any] = (),
    deny: Sequence[Any] = (),
    exclude: Sequence[str] = (),
    cast_parameters: bool = False,
) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Convert a symbol and its parameters, as `mx.model.load_checkpoint` and `Module.get_params` give them.

    Nothing that is passed changes. Save the result with `remove_amp_cast=False`: MXNet drops the casts otherwise.

    Args:
        symbol: The float32 network.
        arg_params: Its float32 parameters by name, any shapes.
        aux_params: Its auxiliary states by name.
        dtype: The compute dtype, which this machine need not compute; None for the one that the parameters' device
            prefers.
        allow: Operators, or their names, to compute in `dtype` beyond MXNet's own list.
        deny: Operators, or their names, to compute in float32.
        exclude: Names of nodes (layers) of the symbol to leave in float32.
        cast_parameters: Store parameters in `dtype` where only operators in `dtype` use them.

    Returns:
        Symbol, parameters and auxiliary states.

    Raises:
        UnsupportedDtypeError: It is float32; or None, and the device computes in no low precision.
        UnsupportedOpError: An entry of `allow` or `deny` is unknown, or stands in both.
        InvalidOptionError: An entry of `exclude` is no node of the symbol, or a parameter is not float32.
    """
    chosen = _choose_dtype(dtype, [*arg_params.values(), *aux_params.values()])
    _check_float32({**arg_params, **aux_params})
    options = _options(symbol, chosen, allow, deny, exclude)
    # Native defect: convert_model writes into the dictionaries it is given.
    converted: tuple[Any, dict[str, Any], dict[str, Any]] = amp.convert_model(
        symbol, dict(arg_params), dict(aux_params), chosen, cast_optional_params=cast_parameters, **options
    )
    return converted


@oplists.corrected()
def convert_symbol(
    symbol: mx.sym.Symbol,
    dtype: str | None = None,
    *,
    allow: Sequence[Any] = (),
    deny: Sequence[Any] = (),
    exclude: Sequence[str] = (),
    data_names: Sequence[str] | None = None,
    cast_parameters: bool = False,
) -> mx.sym.Symbol:
    """Convert a symbol alone, for the device of the current context: see `convert_model`.

    `data_names` are the inputs that are data and no parameters; None: those that MXNet takes for data.
    """
    chosen = _choose_dtype(dtype, [])
    options = _options(symbol, chosen, allow, deny, exclude)
    return amp.convert_symbol(symbol, chosen, data_names=data_names, cast_optional_params=cast_parameters, **options)


@oplists.corrected()
def convert_hybrid_block(
    block: mx.gluon.HybridBlock,
    dtype: str | None = None,
    *,
    allow: Sequence[Any] = (),
    deny: Sequence[Any] = (),
    exclude: Sequence[str] = (),
    cast_parameters: bool = False,
) -> mx.gluon.SymbolBlock:
    """Convert a block that was hybridized and called at least once; the block itself stays as it is.

    Export the result with `remove_amp_cast=False`: MXNet drops the casts otherwise. Options are those of
    `convert_model`; `exclude` names nodes of the block's graph.

    Returns:
        A block for inference with parameters of its own, on the context of the block's.

    Raises:
        UnsupportedDtypeError, UnsupportedOpError: As `convert_model`.
        InvalidOptionError: The block has no graph yet, or as `convert_model`.
    """
    if not getattr(block, "_cached_graph", ()):
        raise InvalidOptionError(
            f"convert_hybrid_block got {type(block).__name__}, which has no graph; accepted: a HybridBlock that was "
            f"hybridized and called. Call block.hybridize() and run it once on some input."
        )
    parameters = {name: parameter.data(parameter.list_ctx()[0]) for name, parameter in block.collect_params().items()}
    chosen = _choose_dtype(dtype, list(parameters.values()))
    _check_float32(parameters)
    options = _options(block._cached_graph[1], chosen, allow, deny, exclude)
    with warnings.catch_warnings():
        # It builds the new block before it knows the inputs' dtypes, which the first call tells.
        warnings.filterwarnings("ignore", "Cannot decide type for the following arguments", UserWarning)
        return amp.convert_hybrid_block(
            block, chosen, ctx=_context(list(parameters.values())), cast_optional_params=cast_parameters, **options
        )


def _context(arrays: Sequence[mx.nd.NDArray]) -> mx.Context:
    return arrays[0].context if arrays else mx.current_context()


def _choose_dtype(asked: str | None, arrays: Sequence[mx.nd.NDArray]) -> Dtype:
    """Return what was asked for, which this machine need not compute: models are converted for others, too."""
    if asked is not None:
        if (dtype := normalise_dtype(asked)) == "float32":
            raise UnsupportedDtypeError(
                "dtype='float32' was asked for, which the model has; accepted: float16, bfloat16. Pass one of these."
            )
        return dtype
    device = devices.describe(_context(arrays).device_type)
    if device.preferred is None:
        raise UnsupportedDtypeError(
            f"no dtype was asked for, and MXNet computes none but float32 on {device.name!r}: {device.reason}; "
            f"accepted: float16, bfloat16, for another device. Pass one of these, or leave the model in float32."
        )
    return device.preferred


def _check_float32(parameters: Mapping[str, mx.nd.NDArray]) -> None:
    # MXNet's conversion takes float32 for granted.
    other = sorted(name for name, value in parameters.items() if value.dtype != DTYPES["float32"])
    if other:
        raise InvalidOptionError(
            f"{len(other)} parameters are not float32 ({', '.join(other[:5])}); accepted: a float32 model. Convert the "
            f"model as it was trained, once."
        )


def _options(
    symbol: mx.sym.Symbol, dtype: Dtype, allow: Sequence[Any], deny: Sequence[Any], exclude: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of the native conversion that say what computes in which dtype."""
    nodes = [name.removesuffix("_output") for name in symbol.get_internals().list_outputs()]
    if unknown := sorted(set(exclude) - set(nodes)):
        raise InvalidOptionError(
            f"exclude names {', '.join(unknown)}, which the graph does not contain; accepted: names of its nodes, such "
            f"as {', '.join(nodes[:9])}. Correct or remove it."
        )
    plan = oplists.check_plan(CastPlan("", dtype, "O1", tuple(allow), tuple(deny)))
    return {**oplists.conversion(plan), "excluded_sym_names": list(exclude)}
