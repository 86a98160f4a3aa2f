"""`ampx_jax.autocast`: a function transform that casts by op lists."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import jax

from . import modules, scopes
from .casting import active, is_array
from .equations import own_rules
from .interpreter import evaluate, mode_of

Function = TypeVar("Function", bound=Callable[..., Any])


class _Array:
    """Stands for an array among what a traced function returns."""


def autocast(function: Function) -> Function:
    """Return a function that computes in mixed precision, as the session of `ampx.init("jax")` says.

    Arguments and results keep their dtypes; inside, each operation computes in the dtype of its list. The function is
    traced at every call, as by `jax.jit`: Python code must not depend on the values of arrays. It composes with
    `jit`, `grad`, `vmap`, `checkpoint` and functions with derivatives of their own, inside and outside.

    Args:
        function: Any function that JAX can trace. Arrays are found in its arguments wherever they are; other leaves
            (strings, functions, Python numbers) are passed on as they are. Objects of flax nnx among its arguments
            change as they would without the transform.

    Returns:
        The function; where no session casts, it calls the original.

    Raises:
        ProtocolError: (when called) It changes an object of flax nnx that is none of its arguments.
    """
    # The attributes of an object that is called, a module's parts say, are none of the new function.
    updated = functools.WRAPPER_UPDATES if isinstance(function, types.FunctionType) else ()

    @functools.wraps(function, updated=updated)
    def casting(*args: Any, **kwargs: Any) -> Any:
        return call(function, args, kwargs)

    return casting  # type: ignore[return-value]


def call(function: Callable[..., Any], args: Any, kwargs: Any, scale: Any = None) -> Any:
    """Call a function in mixed precision, as the session says.

    Args:
        function: As in `autocast`.
        args: Positional arguments.
        kwargs: Named arguments.
        scale: What its result will be multiplied by before it is differentiated: derivative rules that the user's own
            code has written get cotangents that are divided by it, and what they return is multiplied again.
    """
    mode = mode_of(active.value)
    if mode.plan is None and not (mode.forced or mode.taps):
        return function(*args, **kwargs)
    named = scopes.naming(None, mode.taps) if mode.forced or mode.taps else nullcontext()

    def run(closed: Any, arrays: list[Any]) -> list[Any]:
        scaled = scale is not None and own_rules(closed.jaxpr)
        return evaluate(replace(mode, scale=scale) if scaled else mode, closed, arrays)

    with named:
        return modules.call(functools.partial(traced_by, run), function, args, kwargs)


def traced_by(run: Callable[[Any, list[Any]], list[Any]], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces `function`, and runs the closed jaxpr with its arrays by `run`."""

    def run_traced(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
        returned: list[Any] = []  # the structure of what the function returns, and its leaves but for the arrays

        def traced(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            args, kwargs = jax.tree.unflatten(structure, filled)
            results, shape = jax.tree.flatten(function(*args, **kwargs))
            returned[:] = [
                shape,
                [_Array if is_array(leaf) else leaf for leaf in results],
            ]  # no tracer leaves the trace
            return [leaf for leaf in results if is_array(leaf)]

        arrays = [leaves[place] for place in places]
        closed = jax.make_jaxpr(traced)(*arrays)
        shape, results = returned
        computed = iter(run(closed, arrays))
        return jax.tree.unflatten(shape, [next(computed) if leaf is _Array else leaf for leaf in results])

    return run_traced
