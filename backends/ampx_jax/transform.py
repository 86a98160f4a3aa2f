"""`ampx_jax.autocast`: a function transform that casts by op lists."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from . import modules
from .casting import active, is_array
from .interpreter import Mode, evaluate
from .rules import JaxPlan

Function = TypeVar("Function", bound=Callable[..., Any])


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
        plan = active.value
        if plan is None:
            return function(*args, **kwargs)
        return modules.call(functools.partial(_cast, plan), function, args, kwargs)

    return casting  # type: ignore[return-value]


def _cast(plan: JaxPlan, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces `function` and runs it by a plan."""

    def casting(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
        results: list[Any] = []

        def traced(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            args, kwargs = jax.tree.unflatten(structure, filled)
            result, shape = jax.tree.flatten(function(*args, **kwargs))
            results[:] = [shape, result]
            return [leaf for leaf in result if is_array(leaf)]

        arrays = [leaves[place] for place in places]
        closed = jax.make_jaxpr(traced)(*arrays)
        shape, result = results
        computed = iter(evaluate(Mode(plan), closed, arrays))
        return jax.tree.unflatten(shape, [next(computed) if is_array(leaf) else leaf for leaf in result])

    return casting
