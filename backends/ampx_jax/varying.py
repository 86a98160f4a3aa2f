"""What the types of values say of devices: on which they differ in a `shard_map`, and how they are sharded.

All branches of a condition must say the same of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def switch(index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    """Return what one of several functions returns, marked as different where it is in any."""
    kinds = [jax.eval_shape(branch) for branch in branches]

    def marked(branch: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: jax.tree.map(lambda value, *shapes: _like(value, shapes), branch(), *kinds)

    return jax.lax.switch(index, [marked(branch) for branch in branches])


def full(shape: Any, number: float) -> Any:
    """Return an array of a shape and dtype, sharded as its type says."""
    array, sharding = jax.numpy.full(shape.shape, number, shape.dtype), _sharding(shape)
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


def _like(value: Any, shapes: tuple[Any, ...]) -> Any:
    missing = frozenset[str]().union(*map(_varying, shapes)) - _varying(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def _varying(shape: Any) -> frozenset[str]:
    # The attribute has changed its name: `vma` up to some JAX version, then part of `manual_axis_type`.
    manual = getattr(shape, "manual_axis_type", None)
    return frozenset((getattr(shape, "vma", None) if manual is None else manual.varying) or ())
