"""`ampx_jax.autocast`: a function transform that casts by op lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .casting import active, is_array
from .interpreter import evaluate

Function = TypeVar("Function", bound=Callable[..., Any])


def autocast(function: Function) -> Function:
    """Give a function that computes in mixed precision, as the session of `ampx.init("jax")` says.

    Arguments and results keep their dtypes; inside, each operation computes in the dtype of its list. The function is
    traced at every call, as by `jax.jit`: Python code must not depend on the values of arrays. It composes with
    `jit`, `grad`, `vmap`, `checkpoint` and functions with derivatives of their own, inside and outside.

    Args:
        function: Any function that JAX can trace. Arrays are found in its arguments wherever they are; other leaves
            (strings, functions, Python numbers) are passed on as they are.

    Returns:
        The function; where no session casts, it calls the original.

    Sync: none.
    """

    @functools.wraps(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        plan = active.value
        if plan is None:
            return function(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
        results: list[Any] = []

        def traced(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            given, named = jax.tree.unflatten(structure, filled)
            found, shape = jax.tree.flatten(function(*given, **named))
            results[:] = [shape, found]
            return [leaf for leaf in found if is_array(leaf)]

        arrays = [leaves[place] for place in places]
        closed = jax.make_jaxpr(traced)(*arrays)
        shape, found = results
        computed = iter(evaluate(plan, closed, arrays))
        return jax.tree.unflatten(shape, [next(computed) if is_array(leaf) else leaf for leaf in found])

    return casting  # type: ignore[return-value]
