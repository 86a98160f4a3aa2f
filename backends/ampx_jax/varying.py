"""Values on several devices: on which they differ in a `shard_map`, what all agree on, and how they are sharded.

All branches of a condition must say the same of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def switch(index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    """Return what one of several functions returns, marked as different where it is in any."""
    kinds = [jax.eval_shape(branch) for branch in branches]

    def marked(branch: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: jax.tree.map(lambda value, *shapes: _like(value, shapes), branch(), *kinds)

    return jax.lax.switch(index, [marked(branch) for branch in branches])


def agreed(value: Any, reduce: Callable[..., Any]) -> Any:
    """Return what is the same on all devices of a `shard_map` or `pmap`; elsewhere the value itself.

    Args:
        value: A value that may differ between them.
        reduce: Makes one of several over the axes that it gets, as `jax.lax.pmin`.
    """
    mapped = axes()
    if mapped and _varying(jax.typeof(jax.lax.axis_index(mapped))):  # JAX checks, and knows on which it differs
        mapped = tuple(axis for axis in mapped if axis in _varying(jax.typeof(value)))
    return reduce(value, mapped) if mapped else value


def of_the_first(value: Any) -> Any:
    """Return the value that the first device of a `shard_map` or `pmap` has; elsewhere the value itself."""
    mapped = axes()
    return jax.lax.psum(jnp.where(place() == 0, value, jnp.zeros_like(value)), mapped) if mapped else value


def place() -> Any:
    """Return the number of the device of a `shard_map` or `pmap` that computes; elsewhere 0."""
    mapped = axes()
    return jax.lax.axis_index(mapped) if mapped else 0


def over_elements(reduce: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function that makes one value of those of all elements of a `jax.vmap`, and elsewhere returns its own.

    Args:
        reduce: Makes one of several along an axis, as `jax.numpy.min`.
    """

    @jax.custom_batching.custom_vmap
    def whole(value: Any) -> Any:
        return value

    @whole.def_vmap
    def one(size: int, batched: Any, values: Any) -> tuple[Any, bool]:
        return whole(reduce(values, axis=0)), False

    return whole


def axes() -> tuple[str, ...]:
    """Return the axes of the `shard_map` or `pmap` that is traced."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def axes_left() -> tuple[str, ...]:
    """Return the axes of its mesh over which it does not map."""
    mapped = axes()
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis not in mapped)


def full(shape: Any, number: float) -> Any:
    """Return an array of a shape and dtype, sharded as its type says."""
    array, sharding = jnp.full(shape.shape, number, shape.dtype), _sharding(shape)
    if sharding is None or jax.sharding.get_abstract_mesh().empty:  # outside of traces it goes with any other
        return array
    return jax.sharding.reshard(array, sharding)


def unsharded(array: Any) -> Any:
    """Return an array that any operation takes, where its type says how it is sharded."""
    sharding = _sharding(jax.typeof(array))
    return array if sharding is None else jax.sharding.reshard(array, sharding.update(spec=PartitionSpec()))


def _sharding(shape: Any) -> NamedSharding | None:
    """Return how a type says that an array is sharded; None where it says nothing."""
    sharding = getattr(shape, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and any(sharding.spec) else None


def follows(value: Any, other: Any) -> bool:
    """Return whether a value is marked as different wherever another one is."""
    return _varying(jax.typeof(other)) <= _varying(jax.typeof(value))


def _like(value: Any, shapes: tuple[Any, ...]) -> Any:
    missing = frozenset[str]().union(*map(_varying, shapes)) - _varying(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def _varying(shape: Any) -> frozenset[str]:
    # The attribute has changed its name: `vma` up to some JAX version, then part of `manual_axis_type`.
    manual = getattr(shape, "manual_axis_type", None)
    return frozenset((getattr(shape, "vma", None) if manual is None else manual.varying) or ())
