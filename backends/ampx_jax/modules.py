"""Functions that change flax nnx modules, as pure functions that `ampx_jax.autocast` can trace.

A module of nnx is an object whose variables change when it is called: running statistics, counts of random streams. A
trace sees copies. So what a function changes becomes one of its results, and is written to the objects afterwards. flax
is not imported here: who has such an object has imported it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import jax

import ampx

_TAG: Final = "ampx_jax.autocast"
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def call(transform: Transform, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a transformed function; objects of flax nnx among its arguments change as without the transform."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return transform(function)(*args, **kwargs)
    function, args = _unbound(nnx, function, args)
    try:
        if not any(_is_object(nnx, leaf) for leaf in _leaves(nnx, (args, kwargs))):
            return transform(function)(*args, **kwargs)
        return _call_with_objects(nnx, transform, function, args, kwargs)
    except sys.modules["flax.errors"].TraceContextError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ampx.ProtocolError(
            f"ampx_jax.autocast got {name}, which changes a flax nnx object that is none of its arguments (a running "
            f"statistic, a random stream); accepted: functions that get such objects as arguments. Pass the module, "
            f"for instance ampx_jax.autocast(lambda model, x: model(x))(model, x)."
        ) from error


def _is_object(nnx: Any, leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable) or nnx.graph.is_graph_node(leaf)


def _leaves(nnx: Any, tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=functools.partial(_is_object, nnx))


def _unbound(nnx: Any, function: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make the object whose method is called an argument."""
    if isinstance(function, types.MethodType) and _is_object(nnx, function.__self__):
        return function.__func__, (function.__self__, *args)
    if _is_object(nnx, function):
        return type(function).__call__, (function, *args)
    return function, args


def _call_with_objects(nnx: Any, transform: Transform, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of objects as a function of their values, and write the values back."""
    rest: list[Any] = []

    def pure(values: Any) -> Any:
        args, kwargs = _merge(nnx, outside, values, inner=True)
        objects = [leaf for leaf in _leaves(nnx, (args, kwargs)) if _is_object(nnx, leaf)]
        result = function(*args, **kwargs)
        after, values = _split(nnx, (objects, result))
        rest[:] = [after]
        return values

    with nnx.update_context(_TAG):
        outside, values = _split(nnx, (args, kwargs))
        values = transform(pure)(values)
        _, result = _merge(nnx, rest[0], values, inner=False)
    return result


def _split(nnx: Any, tree: Any) -> tuple[Any, Any]:
    """Split a tree into what is known when a function is traced, and a tree of arrays."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=functools.partial(_is_object, nnx))
    places = [place for place, leaf in enumerate(leaves) if _is_object(nnx, leaf)]
    with nnx.split_context(_TAG) as context:
        graph, state = context.split([leaves[place] for place in places])
    for place in places:
        leaves[place] = None
    return (structure, places, graph), (state, leaves)


def _merge(nnx: Any, rest: Any, values: Any, inner: bool) -> Any:
    """Undo `_split`; outside of the trace objects that were there before are changed, not made anew."""
    (structure, places, graph), (state, leaves) = rest, values
    with nnx.merge_context(_TAG, inner) as context:
        objects = context.merge(graph, state)
    leaves = list(leaves)
    for place, item in zip(places, objects, strict=True):
        leaves[place] = item
    return jax.tree.unflatten(structure, leaves)
