"""Values that differ between the devices of a `shard_map`: all branches of a condition must say the same of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def switch(index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    """Return what one of several functions returns, marked as different where it is in any."""
    kinds = [jax.eval_shape(branch) for branch in branches]

    def marked(branch: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: jax.tree.map(lambda value, *shapes: _like(value, shapes), branch(), *kinds)

    return jax.lax.switch(index, [marked(branch) for branch in branches])


def _like(value: Any, shapes: tuple[Any, ...]) -> Any:
    missing = frozenset[str]().union(*map(_varying, shapes)) - _varying(jax.typeof(value))
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def _varying(shape: Any) -> frozenset[str]:
    # The attribute has changed its name: `vma` up to some JAX version, then part of `manual_axis_type`.
    manual = getattr(shape, "manual_axis_type", None)
    return frozenset((getattr(shape, "vma", None) if manual is None else manual.varying) or ())
