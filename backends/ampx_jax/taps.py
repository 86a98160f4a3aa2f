"""Identities in traced code at which values are read and rounded: inputs and outputs of modules.

A tap is linear: where what it stands in is differentiated, the cotangent of its operands passes through a tap, too,
whose direction is `"backward"`. So the gradient of a module's output is found in a trace, wherever it was computed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from ampx.formats import find_digits, to_digits

# Dtypes to which values can be rounded, whether or not anything computes in them.
SIMULATED: Final = {"float8_e4m3": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}


class Listening(threading.local):
    """What hears of taps that are not traced, in one thread."""

    heard: Callable[..., None] | None = None


listening: Final = Listening()
tap_p: Final = core.Primitive("ampx_tap")
tap_p.multiple_results = True


def tap(tree: Any, module: str, kind: str, direction: str) -> Any:
    """Return a tree of tuples, lists and dicts whose floating arrays have passed a tap; other things stay."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: not _is_container(node))
    places = [place for place, leaf in enumerate(leaves) if is_floating(leaf)]
    if not places:
        return tree
    tapped = tap_p.bind(*(leaves[place] for place in places), module=module, kind=kind, direction=direction)
    for place, value in zip(places, tapped, strict=True):
        leaves[place] = value
    return jax.tree.unflatten(structure, leaves)


def _is_container(node: Any) -> bool:
    return isinstance(node, (tuple, list, dict))


def is_floating(leaf: Any) -> bool:
    """Return whether this is a floating array, traced or not."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _jvp(primals: Any, tangents: Any, *, direction: str, **names: str) -> tuple[Any, Any]:
    results = tap_p.bind(*primals, direction=direction, **names)
    places = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    if direction != "forward" or not places:
        return results, tangents
    tangents = list(tangents)
    tapped = tap_p.bind(*(tangents[place] for place in places), direction="tangent", **names)
    for place, tangent in zip(places, tapped, strict=True):
        tangents[place] = tangent
    return results, tangents


def _transposed(cotangents: Any, *_: Any, direction: str, **names: str) -> Any:
    if direction != "tangent":
        return cotangents
    return tap_p.bind(*map(ad.instantiate_zeros, cotangents), direction="backward", **names)


def _batched(values: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    return tap_p.bind(*values, **params), axes


def _run(*values: Any, **names: str) -> list[Any]:
    if listening.heard is not None:
        listening.heard(list(values), **names)
    return list(values)


tap_p.def_impl(_run)
tap_p.def_abstract_eval(lambda *avals, **_: list(avals))
ad.primitive_jvps[tap_p] = _jvp
ad.primitive_transposes[tap_p] = _transposed
batching.primitive_batchers[tap_p] = _batched
mlir.register_lowering(tap_p, lambda _, *values, **__: list(values))


def rounds(dtype: str) -> bool:
    """Return whether values are rounded to a dtype or to its digits, and not computed in it."""
    return dtype in SIMULATED or find_digits(dtype) is not None


def _round(value: Any, dtype: str) -> Any:
    bits = find_digits(dtype)
    if bits is None:
        return value.astype(SIMULATED[dtype]).astype(value.dtype)
    nearest = to_digits(value.astype("float32"), bits).astype(value.dtype)
    return jnp.where(jnp.isfinite(nearest), nearest, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded_input(value: Any, dtype: str) -> Any:
    """Round a value to a dtype and keep its own; its gradient passes unchanged."""
    return _round(value, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded_output(value: Any, dtype: str) -> Any:
    """Round a value and its gradient to a dtype, and keep their own."""
    return _round(value, dtype)


rounded_input.defvjp(lambda value, dtype: (_round(value, dtype), None), lambda dtype, _, gradient: (gradient,))
rounded_output.defvjp(
    lambda value, dtype: (_round(value, dtype), None), lambda dtype, _, gradient: (_round(gradient, dtype),)
)
