"""Float32 copies of low-precision parameters, in the optimizer's state, and updates that bring them to the parameters.

An update of a low-precision parameter is float32: what is added to the parameter, in float32, gives the copy. So
`optax.apply_updates`, which adds in the wider dtype and rounds the sum to the parameter's, gives the rounded copy, bit
for bit. Float32 holds the difference of two numbers within a factor of two of each other exactly. For others the copy
takes over what the addition gives, which is at most float32's rounding of the larger of the two away.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import ampx
from ampx.backend import CastPlan

from .prepare import lowered
from .state import AmpState, Transformation


def mastered(tx: Transformation, plan: CastPlan | None) -> Transformation:
    """Return a transformation of float32 copies at O2, which brings the parameters to them; owns `masters`."""

    def init(params: Any) -> AmpState:
        if plan is None or plan.level != "O2":
            return tx.init(params)
        copies = make(params, plan)
        return tx.init(full(copies, params))._replace(masters=copies)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AmpState]:
        before = state.masters
        if before is None:
            return tx.update(updates, state, params, **extra)
        copies = followed(before, params)
        updates, state = tx.update(updates, state._replace(masters=copies), params, **extra)
        updates, copies = step(updates, before, copies, params, state.numbers.finite)
        return updates, state._replace(masters=copies)

    return Transformation(init, update)


def make(params: Any, plan: CastPlan) -> Any:
    """Return the copies: a tree like the parameters, None where these are float32 and stay so.

    Parameters that are all float32, because `prepare` comes later, are copied as they are, before anything is rounded.
    """
    leaves, structure = jax.tree.flatten(params)
    low = [is_low(leaf) for leaf in leaves]
    if not any(low):
        low = lowered(params, plan)
    # Buffers of their own, so that state and parameters can both be donated.
    pairs = zip(leaves, low, strict=True)
    return structure.unflatten(jnp.array(leaf, jnp.float32, copy=True) if copied else None for leaf, copied in pairs)


def followed(masters: Any, params: Any) -> Any:
    """Return the copies, and the parameter's own value where it was written since the last step.

    Raises:
        ProtocolError: There are no parameters, or they are float32.
    """
    if params is None:
        raise ampx.ProtocolError(
            "update of a wrapped optimizer got no parameters, from which level='O2' computes what to add to them; "
            "accepted: all three arguments. Call tx.update(gradients, opt_state, params)."
        )

    def follow(param: Any, master: Any) -> Any:
        if master is None:
            return None
        if not is_low(param):
            raise ampx.ProtocolError(
                f"update of a wrapped optimizer got a {jnp.result_type(param)} parameter that level='O2' has in low "
                f"precision; accepted: what prepare returned, changed by optax.apply_updates, which keeps dtypes "
                f"(equinox.apply_updates widens). Call params = ampx.prepare(params) first."
            )
        # Compared bit by bit: XLA may compare floats as they were before they were rounded.
        bits = jax.lax.bitcast_convert_type(param, jnp.uint16)
        own = jax.lax.bitcast_convert_type(master.astype(param.dtype), jnp.uint16)
        both_zero = ((bits | own) << 1 == 0) & (master != 0)  # adding 0.0 to -0.0 writes nothing
        return jnp.where((bits == own) | both_zero, master, param.astype(jnp.float32))

    return jax.tree.map(follow, params, masters, is_leaf=_is_none)


def full(masters: Any, params: Any) -> Any:
    """Return the parameters in float32, as the wrapped transformation sees them; without copies those themselves."""
    if masters is None:
        return params
    return jax.tree.map(lambda param, master: param if master is None else master, params, masters, is_leaf=_is_none)


def step(updates: Any, before: Any, masters: Any, params: Any, finite: Any) -> tuple[Any, Any]:
    """Return what to add to the parameters, and the copies after it.

    A sum beyond the largest number of a parameter's dtype stays at that number: no parameter becomes infinite by it.

    Args:
        updates: What the wrapped transformation would add to the copies.
        before: The copies in the state, which a skipped step leaves alone.
        masters: The copies, with what was written into the parameters.
        params: The parameters.
        finite: Whether the step is applied.
    """
    changed: list[Any] = []

    def add(param: Any, master: Any, old: Any, update: Any) -> Any:
        if master is None or update is None:
            changed.append(old)
            return update
        start = param.astype(jnp.float32)
        difference = _difference(param.dtype, start, master, update)
        changed.append(jnp.where(finite, start + difference, old))
        return jnp.where(finite, difference, -0.0)

    added = jax.tree.map(add, params, masters, before, updates, is_leaf=_is_none)
    return added, jax.tree.structure(params, is_leaf=_is_none).unflatten(changed)


def after(dtype: Any, param: Any, master: Any, update: Any) -> Any:
    """Return the copy of a parameter after an update; all in float32, but for the dtype, which is the parameter's."""
    return param + _difference(dtype, param, master, update)


def _difference(dtype: Any, param: Any, master: Any, update: Any) -> Any:
    """Return what to add to a parameter."""
    largest = float(jnp.finfo(dtype).max)
    total = master + update
    total = jnp.where(jnp.isfinite(total), jnp.clip(total, -largest, largest), total)
    # Only additions from here on, which give the same wherever the compiler repeats them; adding -0.0 changes nothing.
    return jnp.where(total != param, total - param, -0.0)


def is_low(leaf: Any) -> bool:
    """Return whether this is a floating array narrower than float32."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and jnp.finfo(jnp.result_type(leaf)).bits < 32


def _is_none(node: Any) -> bool:
    return node is None
