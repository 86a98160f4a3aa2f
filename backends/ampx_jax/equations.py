"""What an equation of a trace holds: functions as jaxprs, and which of its operands they receive.

JAX renames primitives and their parameters from version to version. So functions are found by their types.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import ampx
from ampx import callers

# They call the one function that they hold, once, with their operands; derivatives and batching are their own.
CALLS: Final = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat2", "checkpoint"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "linear_call"}
)
# What they hold is computed as it was traced: kernels are written for their dtypes, and solvers stop at a tolerance.
_KERNELS: Final = frozenset(
    ("pallas_call", "core_map", "mpmd_map", "custom_partitioning", "custom_linear_solve", "linear_solve", "CustomRoot")
)


def jaxpr_of(value: Any) -> Any:
    """Return the jaxpr that a value is or closes over; None for other values."""
    jaxpr = getattr(value, "jaxpr", value)
    return jaxpr if hasattr(jaxpr, "eqns") else None


def parts_of(function: Any) -> tuple[Any, Any]:
    """Return the jaxpr of a held function and what it closes over."""
    return jaxpr_of(function), getattr(function, "consts", None) or ()


def held(equation: Any) -> list[Any]:
    """Return the functions that an equation holds, in the order of its parameters."""
    return [value for value in _values(equation.params) if jaxpr_of(value) is not None]


def function_of(equation: Any) -> Any:
    """Return the only function that an equation holds.

    Raises:
        UnsupportedByBackendError: It holds none, or several.
    """
    functions = held(equation)
    if len(functions) != 1:
        raise unknown(equation)
    return functions[0]


def parameter(equation: Any, *names: str) -> Any:
    """Return a parameter of an equation, which has one of several names.

    Raises:
        UnsupportedByBackendError: It has none of them.
    """
    for name in names:
        if name in equation.params:
            return equation.params[name]
    raise unknown(equation)


def is_as_traced(equation: Any) -> bool:
    """Return whether what an equation holds is computed as it was traced: a kernel, a solver, or a sum of elements."""
    functions = [jaxpr_of(function) for function in held(equation)]
    variables = [variable for jaxpr in functions for variable in (*jaxpr.invars, *jaxpr.outvars)]
    combines = all(getattr(variable.aval, "shape", None) == () for variable in variables)
    return _name(equation) in _KERNELS or (combines and equation.primitive.name not in CALLS)


def recast(equation: Any, cast: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the parameters of an equation with its functions replaced by others of the same types.

    Raises:
        UnsupportedByBackendError: It holds more than jaxprs, such as the rules of a derivative.
    """
    replaced = []

    def replace(value: Any) -> Any:
        if jaxpr_of(value) is not None:
            replaced.append(value)
            return cast(value)
        if isinstance(value, (tuple, list)):
            entries = [replace(entry) for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        return value

    if any(callable(value) and not isinstance(value, type) for value in _values(equation.params)):
        raise unknown(equation)
    params = {name: replace(value) for name, value in equation.params.items()}
    if len(replaced) != len(held(equation)):  # one is where it cannot be replaced
        raise unknown(equation)
    return params


def scan_parts(equation: Any) -> tuple[int, int]:
    """Return how many of the operands of a scan are constants, and how many are carried."""
    if "ft_in" in equation.params:  # since some JAX version
        constants, carried, _ = equation.params["ft_in"].unpack()
        return len(constants), len(carried)
    return parameter(equation, "num_consts"), parameter(equation, "num_carry")


# They hold a rule that takes cotangents, which need not be linear in them. What a custom_jvp_call holds is: JAX
# transposes it.
_TAKES_COTANGENTS: Final = frozenset({"custom_vjp_call", "linear_call"})


def own_rules(jaxpr: Any) -> list[str]:
    """Return the rules in a jaxpr that take cotangents and that the user's own code has written, as `"train.py:12"`."""
    rules = []
    for equation in jaxpr.eqns:
        rules += own_rules_of(equation)
        if equation.primitive.name not in _TAKES_COTANGENTS:
            rules += [rule for function in held(equation) for rule in own_rules(jaxpr_of(function))]
    return rules


def own_rules_of(equation: Any) -> list[str]:
    """Return the place of the rule of an equation that takes cotangents, where the user's own code has written it."""
    if equation.primitive.name not in _TAKES_COTANGENTS:
        return []
    # A library's rule may call a function of the script's: it is given what it would get without a loss scale, too.
    others = [value for value in equation.params.values() if jaxpr_of(value) is None]
    codes = [f.__code__ for f in _functions(others, set()) if callers.is_script_function(f)]
    return [f"{code.co_filename}:{code.co_firstlineno}" for code in codes[:1]]


def _functions(thing: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """Yield the functions that a rule is or calls: wrapped, bound, or closed over."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, types.FunctionType):
        yield thing
    for entry in _parts(thing):
        yield from _functions(entry, seen)


def _parts(thing: Any) -> Iterator[Any]:
    """Yield what a function closes over, and what a thing that stands for functions holds."""
    if isinstance(thing, types.FunctionType):
        for cell in thing.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                yield cell.cell_contents
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, (tuple, list)):
        yield from thing
    elif type(thing).__name__ == "WrappedFun":  # JAX's own wrapper
        yield from (thing.f, thing.transforms)
    elif callable(thing) and not isinstance(thing, type):
        yield from (getattr(thing, "__wrapped__", None), *getattr(thing, "__dict__", {}).values())


def unknown(equation: Any) -> ampx.UnsupportedByBackendError:
    """Return the error for a primitive that holds functions in a way that is not known here."""
    return ampx.UnsupportedByBackendError(
        f"the traced function calls the JAX primitive {_name(equation)!r}, which holds a function in a way that ampx "
        f"does not know: it would run uncast; accepted: {', '.join(sorted(CALLS))}, cond, scan, shard_map, while, and "
        f"primitives that hold nothing but jaxprs. Call it in `with ampx.autocast(enabled=False)`, and report the "
        f"name of the primitive and the version of JAX to the authors of ampx."
    )


def _name(equation: Any) -> str:
    """Return the name of a primitive; of one that is an object among the parameters, its class."""
    for value in equation.params.values():
        if _is_primitive(value):
            return type(value).__name__
    return str(equation.primitive.name)


def _is_primitive(value: Any) -> bool:
    return isinstance(getattr(value, "params", None), dict) and callable(getattr(value, "expand", None))


def _values(value: Any) -> Iterator[Any]:
    """Yield what parameters hold: entries of tuples, lists and dicts, and parameters of primitives that are objects."""
    if isinstance(value, Mapping):
        for entry in value.values():
            yield from _values(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _values(entry)
    elif _is_primitive(value):
        yield from _values(value.params)
    else:
        yield value
