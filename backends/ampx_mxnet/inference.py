"""Trained gluon blocks in low precision: their symbol, converted by MXNet itself, as a `SymbolBlock`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ampx.backend import Array, Backend, is_module
from ampx.errors import ConversionError, InvalidOptionError
from ampx.shipping import layers as shipping
from ampx.shipping.converter import Conversion, Converted, Converter

from .calls import named
from .compat import mx
from .convert import convert_model
from .dtypes import DTYPES, name_of


def convert(backend: Backend, model: Any, conversion: Conversion) -> Converted:
    """Convert a block that can be hybridized; entries of `deny` may be operators, too.

    Save what it returns with `remove_amp_cast=False`: MXNet drops the casts otherwise.
    """
    parameters = _parameters(model)
    context = next(iter(parameters.values())).context if parameters else mx.current_context()
    shipping.check_computed(backend, context.device_type, conversion.dtype)
    if conversion.batch is None:
        raise InvalidOptionError(
            "convert got no batch, and has to trace the block to convert its graph; accepted: batches=[…] with one "
            "batch at least. Pass some of what the block is called with."
        )
    arrays = _arrays(conversion.batch)
    inputs, symbol = _traced(model, len(arrays))
    stored = {name: parameters[name] for name in symbol.list_inputs() if name in parameters}
    blocks = dict(named(model))
    denied = shipping.denied_names([entry for entry in conversion.deny if is_module(entry)], blocks)
    if conversion.dtype != "float32":
        symbol, stored = _lowered(symbol, stored, conversion, [blocks[name] for name in denied])
    target = "float32" if conversion.keep_io else conversion.dtype
    converted = _block(_cast(symbol, inputs, arrays, target), inputs, stored, context)
    return Converted(converted, shipping.leaves_first([name for name in blocks if name not in denied]))


def _lowered(
    symbol: Any, stored: Mapping[str, Any], conversion: Conversion, denied: Sequence[Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a graph and its parameters in low precision, but for denied blocks; raise where a parameter overflows."""
    auxiliary = set(symbol.list_auxiliary_states())
    lowered, arguments, states = convert_model(
        symbol,
        {name: value for name, value in stored.items() if name not in auxiliary},
        {name: value for name, value in stored.items() if name in auxiliary},
        conversion.dtype,
        deny=[entry for entry in conversion.deny if not is_module(entry)],
        exclude=_nodes(symbol, denied),
        cast_parameters=True,
    )
    values = {**arguments, **states}
    changed = sorted(name for name, value in values.items() if value.dtype != stored[name].dtype)
    shipping.check_fits(conversion.dtype, {name: shipping.largest(stored[name].asnumpy()) for name in changed})
    return lowered, values


def infer(model: Any, batch: Any) -> Mapping[str, Array]:
    """Call a converted block."""
    return shipping.named_outputs(model(*_arrays(batch)), _array)


def _array(value: Any) -> Array | None:
    if not isinstance(value, mx.nd.NDArray):
        return None
    floating = name_of(value.dtype) in (*DTYPES, "float64")
    return (value.astype("float32") if floating else value).asnumpy()


def _arrays(batch: Any) -> tuple[Any, ...]:
    return shipping.positional(batch, mx.nd.NDArray, "NDArrays, which blocks take")


def _parameters(model: Any) -> dict[str, Any]:
    """Return the values of the parameters, by the names that they have in symbols."""
    if not isinstance(model, mx.gluon.HybridBlock):
        raise InvalidOptionError(
            f"convert got {type(model).__module__}.{type(model).__qualname__}; accepted: a HybridBlock of gluon, of "
            f"which MXNet makes a graph. Derive from HybridBlock, with hybrid_forward."
        )
    try:
        return {name: parameter.data(parameter.list_ctx()[0]) for name, parameter in model.collect_params().items()}
    except (RuntimeError, mx.gluon.parameter.DeferredInitializationError) as error:
        raise InvalidOptionError(
            f"convert got {type(model).__name__} before it has weights ({str(error).splitlines()[0]}); accepted: a "
            f"trained block. Load its parameters, or call it once."
        ) from error


def _traced(model: Any, count: int) -> tuple[list[Any], Any]:
    """Return so many inputs, and the graph that a block makes of them."""
    inputs = [mx.sym.var(f"data{place}") for place in range(count)]
    try:
        outputs = model(*inputs)
    except Exception as error:
        raise ConversionError(
            f"convert cannot make a graph of {type(model).__name__} ({type(error).__name__}: {error}); accepted: "
            f"blocks that can be hybridized. Use operators that symbols have, too."
        ) from error
    if isinstance(outputs, (list, tuple)):
        outputs = mx.sym.Group([symbol for output in outputs for symbol in output])
    return inputs, outputs


def _nodes(symbol: Any, blocks: Sequence[Any]) -> list[str]:
    """Return the operators of a graph that some blocks, or blocks inside, made: their names begin with the prefix."""
    prefixes = tuple(inner.prefix for block in blocks for _, inner in named(block) if inner.prefix)
    inputs = set(symbol.list_inputs())
    nodes = [name.rpartition("_output")[0] or name for name in symbol.get_internals().list_outputs()]
    return [name for name in dict.fromkeys(nodes) if name.startswith(prefixes) and name not in inputs]


def _cast(symbol: Any, inputs: Sequence[Any], arrays: Sequence[Any], dtype: str) -> Any:
    """Return a graph whose floating outputs are of a dtype."""
    _, kinds, _ = symbol.infer_type(
        **{variable.name: array.dtype for variable, array in zip(inputs, arrays, strict=True)}
    )
    floating = (*DTYPES, "float64")
    outputs = [
        mx.sym.cast(output, DTYPES[dtype]) if kind is None or name_of(kind) in floating else output
        for output, kind in zip(symbol, kinds or [None] * len(symbol), strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else mx.sym.Group(outputs)


def _block(symbol: Any, inputs: Sequence[Any], stored: Mapping[str, Any], context: Any) -> Any:
    with warnings.catch_warnings():
        # It is built before it knows the dtypes of its inputs, which the first call tells.
        warnings.filterwarnings("ignore", "Cannot decide type for the following arguments", UserWarning)
        block = mx.gluon.SymbolBlock(symbol, list(inputs))
    for name, parameter in block.collect_params().items():
        parameter.cast(stored[name].dtype)
        parameter._load_init(stored[name].copy(), ctx=context)
        parameter.grad_req = "null"
    return block


class MXNetConverter(Converter):
    """Converts blocks of MXNet."""

    infer = staticmethod(infer)

    def convert(self, model: Any, conversion: Conversion) -> Converted:
        return convert(self.backend, model, conversion)
