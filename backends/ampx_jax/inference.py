"""Trained models in low precision: a function that casts by op lists, and parameters stored as it uses them.

A parameter that is cast to the low dtype wherever it is used is stored in it; all others, as those of normalization and
of biases, stay float32. A trace of the function says which these are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ampx.backend import Array, Backend, CastPlan, is_module
from ampx.errors import ConversionError, InvalidOptionError
from ampx.policy import Dtype
from ampx.shipping.converter import Conversion, Converted, Converter
from ampx.shipping.layers import arguments, check_computed, check_fits, denied_names, leaves_first, named_outputs

from . import casting, equations, rules, scopes
from .casting import is_array
from .state import path_name
from .transform import autocast

# What hands its first operand on, in another order.
_LAYOUT: Final = frozenset(
    ("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "rev", "copy", "expand_dims")
)


def convert(backend: Backend, model: Any, conversion: Conversion) -> Converted:
    """Convert a pair of a function and its parameters; or a module of flax nnx or equinox, to a `Partial`."""
    function, parameters = _split(model)
    _check_wide(parameters)
    if conversion.batch is None:
        raise InvalidOptionError(
            "convert got no batch, and has to trace the model to know which parameters are used in which dtype; "
            "accepted: batches=[…] with one batch at least. Pass some of what the model is called with."
        )
    device = _device(parameters)
    check_computed(backend, device, conversion.dtype)
    args, kwargs = arguments(conversion.batch)
    names = _names(function, parameters, args, kwargs)
    denied = denied_names([entry for entry in conversion.deny if is_module(entry)], names)
    dtype: Dtype = "float16" if conversion.dtype == "float32" else conversion.dtype
    plan = rules.resolve(CastPlan(device, dtype, "O1", (), conversion.deny))
    low = _Low(function, plan, conversion)
    stored = parameters
    if conversion.dtype != "float32":
        stored = _stored(low, parameters, args, kwargs, conversion.dtype)
    converted = jax.tree_util.Partial(low, stored) if _is_module(model) else (low, stored)
    return Converted(converted, leaves_first([name for name in names if name not in denied]))


def infer(model: Any, batch: Any) -> Mapping[str, Array]:
    """Call a converted model, compiled."""
    args, kwargs = arguments(batch)
    bound = jax.tree_util.Partial(*model) if isinstance(model, tuple) else model
    return named_outputs(jax.jit(_call)(bound, args, kwargs), _array)


def _call(model: Any, args: Any, kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _array(value: Any) -> Array | None:
    if not is_array(value):
        return None
    return np.asarray(value, np.float32 if jnp.issubdtype(value.dtype, jnp.floating) else None)


class _Low:
    """The function of a converted model: parameters of any floating dtype are taken as float32, and then cast."""

    def __init__(self, function: Callable[..., Any], plan: rules.JaxPlan, conversion: Conversion) -> None:
        self.function, self.plan, self.conversion = function, plan, conversion
        self.__name__ = getattr(function, "__name__", type(function).__name__)  # which jax.export wants

    def __call__(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute; the compiler drops what is cast back and forth."""
        target = jnp.float32 if self.conversion.keep_io else jnp.dtype(self.conversion.dtype)
        with self._region():
            result = autocast(self.function)(jax.tree.map(_widened, parameters), *args, **kwargs)
        return jax.tree.map(lambda leaf: leaf.astype(target) if _is_float32(leaf) else leaf, result)

    def _region(self) -> AbstractContextManager[None]:
        return casting.region(self.plan, self.conversion.dtype != "float32")


def _is_float32(leaf: Any) -> bool:
    return is_array(leaf) and leaf.dtype in (jnp.float32, jnp.float16, jnp.bfloat16)


def _widened(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if is_array(leaf) and leaf.dtype in (jnp.float16, jnp.bfloat16) else leaf


# -- models ------------------------------------------------------------------------------------------------------------


def _is_module(model: Any) -> bool:
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    return (nnx is not None and isinstance(model, nnx.Module)) or (
        equinox is not None and isinstance(model, equinox.Module)
    )


def _split(model: Any) -> tuple[Callable[..., Any], Any]:
    """Return a pure function and its parameters; of a module, in inference mode."""
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    function: Callable[..., Any]
    if nnx is not None and isinstance(model, nnx.Module):
        copied = nnx.clone(model)
        copied.eval()
        graph, parameters = nnx.split(copied)

        def function(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            return nnx.merge(graph, parameters)(*args, **kwargs)

    elif equinox is not None and isinstance(model, equinox.Module) and callable(model):
        parameters, rest = equinox.partition(equinox.nn.inference_mode(model), equinox.is_array)

        def function(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            return equinox.combine(parameters, rest)(*args, **kwargs)

    elif isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        function, parameters = model
    else:
        raise InvalidOptionError(
            f"convert got {type(model).__name__}; accepted: a pair of a function and its parameters, of which it is "
            f"called with the parameters and a batch, or a module of flax nnx or equinox that can be called. Pass "
            f"(function, parameters); of flax linen, (model.apply, variables)."
        )
    return function, parameters


def _check_wide(parameters: Any) -> None:
    """Raise for parameters in low precision, and where none is floating."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(parameters) if is_array(leaf)}
    floating = {str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    if not floating or floating & {"float16", "bfloat16"}:
        raise InvalidOptionError(
            f"convert got parameters of {', '.join(sorted(floating)) or 'no floating dtype'}; accepted: float32 "
            f"parameters, of which alone something can be told about float32. Pass those that were trained."
        )


def _device(parameters: Any) -> str:
    arrays = [leaf for leaf in jax.tree.leaves(parameters) if isinstance(leaf, jax.Array)]
    platform = next(iter(arrays[0].devices())).platform if arrays else "cpu"
    return "cuda" if platform == "gpu" else str(platform)


# -- what a trace says -------------------------------------------------------------------------------------------------


def _names(function: Callable[..., Any], parameters: Any, args: Any, kwargs: Any) -> list[str]:
    """Return the names of the modules, and of what `jax.named_scope` names, in order of execution."""
    with scopes.naming(), casting.active(None):
        closed = _traced(function, parameters, args, kwargs)
    return list(dict.fromkeys(name for name in _scope_names(closed.jaxpr, "") if name))


def _traced(function: Callable[..., Any], parameters: Any, args: Any, kwargs: Any) -> Any:
    """Return the jaxpr of a function of the parameters; what else it gets is known."""
    leaves, structure = jax.tree.flatten(parameters)
    try:
        return jax.make_jaxpr(lambda *leaves: function(jax.tree.unflatten(structure, leaves), *args, **kwargs))(*leaves)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise ConversionError(
            f"the model cannot be traced with the first batch ({type(error).__name__}: {lines[0]}); accepted: "
            f"functions that jax.jit compiles. Correct the batch or the function."
        ) from error


def _scope_names(jaxpr: Any, path: str) -> Iterator[str]:
    for equation in jaxpr.eqns:
        stack = "/".join(filter(None, (path, str(equation.source_info.name_stack))))
        yield from (scope.name for scope in scopes.scopes_of(stack))
        for inner in _inner(equation):
            yield from _scope_names(inner, stack)


def _inner(equation: Any) -> list[Any]:
    """Return the functions that an operation calls."""
    return [equations.jaxpr_of(function) for function in equations.held(equation)]


def _stored(low: _Low, parameters: Any, args: Any, kwargs: Any, dtype: str) -> Any:
    """Return the parameters, in the low dtype where all that is done with them begins by casting them to it."""
    leaves, structure = jax.tree.flatten(parameters)
    closed = _traced(low, parameters, args, kwargs)
    wide = {
        id(leaf)
        for leaf, variable in zip(leaves, closed.jaxpr.invars, strict=True)
        if not (is_array(leaf) and leaf.dtype == jnp.float32 and _is_cast(closed.jaxpr, variable, jnp.dtype(dtype)))
    }
    paths = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(parameters)[0]]
    lowered = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if id(leaf) not in wide}
    check_fits(dtype, {path: _largest(leaf) for path, leaf in lowered.items()})
    casts = {id(leaf): jnp.asarray(leaf).astype(dtype) for leaf in lowered.values()}  # once, where it occurs twice
    return jax.tree.unflatten(structure, [casts.get(id(leaf), leaf) for leaf in leaves])


def _largest(leaf: Any) -> float:
    return float(jnp.max(jnp.where(jnp.isfinite(leaf), jnp.abs(leaf), 0.0), initial=0.0))


def _is_cast(jaxpr: Any, variable: Any, dtype: Any) -> bool:
    """Return whether a variable is used, and every use of it begins by casting it to a dtype."""
    if any(variable is other for other in jaxpr.outvars):
        return False
    uses = 0
    for equation in jaxpr.eqns:
        for place, operand in enumerate(equation.invars):
            if operand is not variable:
                continue
            uses += 1
            if not _casts(equation, place, dtype, jaxpr):
                return False
    return uses > 0


def _casts(equation: Any, place: int, dtype: Any, jaxpr: Any) -> bool:
    name, params = equation.primitive.name, equation.params
    if name == "ampx_product":  # which casts its factors
        return bool(params["dtype"] == dtype)
    if name == "convert_element_type" and params["new_dtype"] != jnp.float32:  # else a weak type becomes a plain one
        return bool(params["new_dtype"] == dtype)
    if name == "convert_element_type" or (name in _LAYOUT and place == 0):
        return _is_cast(jaxpr, equation.outvars[0], dtype)
    inner = _receiver(equation, place)
    return inner is not None and _is_cast(inner, inner.invars[place], dtype)


def _receiver(equation: Any, place: int) -> Any:
    """Return the only function that an operation calls, if that receives an operand unchanged, or rows of it."""
    if equation.primitive.name == "scan":
        constants, carried = equations.scan_parts(equation)
        if constants <= place < constants + carried:
            return None
    inner = _inner(equation)
    if equation.primitive.name == "while" or len(inner) != 1 or len(inner[0].invars) != len(equation.invars):
        return None
    return inner[0]


class JaxConverter(Converter):
    """Converts functions with parameters, and modules of flax and equinox."""

    infer = staticmethod(infer)

    def convert(self, model: Any, conversion: Conversion) -> Converted:
        return convert(self.backend, model, conversion)
