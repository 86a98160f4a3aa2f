"""`wrap_optimizer` for optax: unscale, check, clip, apply or skip, move the scale; all in traceable code.

A wrapped transformation is five, one around the other: `scaled(mastered(metered(clipped(skipping(tx)))))`. They share
one state, `AmpState`, and each owns a part of it. Inside of `scaled`, `packed` holds the `Numbers` of the present step;
inside of `mastered`, `masters` holds the float32 copies with what the script wrote into its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ampx
from ampx import callers
from ampx.backend import CastPlan
from ampx.protocol import ScaleGroup

from . import masters, prepare, state as states, varying
from .accumulation import let_multi_steps_recover
from .casting import in_float64
from .gradients import clip, unscale
from .masters import mastered
from .meter import metered
from .state import AmpState, DisabledState, Numbers, Settings, Transformation
from .taps import is_floating


class Update:
    """The update function of a wrapped transformation, with a type of its own by which ampx recognises it."""

    def __init__(self, update: Callable[..., Any], inner: optax.GradientTransformation, group: ScaleGroup) -> None:
        self._update = update
        self.inner = inner
        self.group = group  # as in `wrap`

    def __call__(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Turn scaled gradients into updates.

        Raises:
            NotWrappedError: The state is none of a wrapped transformation.
            ProtocolError: It is of a disabled session and the transformation of another, or the other way round.
        """
        _check_state(state, self.group.enabled)
        return self._update(updates, state, params, **extra)


def wrap(inner: optax.GradientTransformation, group: ScaleGroup, options: Mapping[str, Any]) -> Transformation:
    """Return a transformation of scaled gradients whose state carries the loss scale.

    Args:
        inner: What turns unscaled gradients into updates.
        group: The loss scale's configuration, whether it is enabled, and its position in the order of wrapping.
        options: `max_grad_norm`, `max_grad_value`, and `axis_name`: names of mapped axes (`shard_map`, `pmap`, `vmap`)
            over which finiteness is agreed on; and the session's `plan`, whose level may ask for float32 copies.

    Raises:
        AlreadyWrappedError: `inner` is wrapped.
        UnsupportedByBackendError: It is one of a list.
    """
    if isinstance(inner.update, Update):
        raise ampx.AlreadyWrappedError(
            "wrap_optimizer got a transformation that is wrapped already; its gradients would be unscaled twice. Use "
            "the object that the first call returned."
        )
    if len(group.members) > 1:
        raise ampx.UnsupportedByBackendError(
            f"wrap_optimizer got a list of {len(group.members)} optimizers or more, but backend 'jax' keeps the loss "
            f"scale in one optimizer state; accepted: one optimizer. Join them in one before wrapping."
        )
    let_multi_steps_recover()
    inner = optax.with_extra_args_support(inner)
    bounds = options["max_grad_norm"], options["max_grad_value"]
    if group.enabled:
        axes, plan = options.get("axis_name"), options["plan"]
        axes = () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        settings = Settings(group.config, True, compute="float32" if plan is None else plan.dtype)
        tx = skipping(inner, settings, axes, counted=bounds != (None, None))
        tx = scaled(mastered(metered(clipped(tx, *bounds), group, plan), plan), group, plan, axes)
    else:
        tx = disabled(inner, *bounds)
    return Transformation(tx.init, Update(tx.update, inner, group))


def _check_state(state: Any, enabled: bool) -> None:
    if not isinstance(state, (AmpState, DisabledState)):
        raise ampx.NotWrappedError(
            f"update of a wrapped optimizer got {type(state).__name__} as its state; accepted: what its init or its "
            f"last update returned. Call opt_state = tx.init(params), and load checkpoints into that."
        )
    if state.settings.enabled is not enabled:
        sessions = ("an enabled session", "a disabled one")
        wrapper, maker = sessions if enabled else sessions[::-1]
        raise ampx.ProtocolError(
            f"update of an optimizer that {wrapper} wrapped got a state that {maker} made: losses and gradients would "
            f"not be scaled alike; accepted: what its own init or update returned. Call opt_state = tx.init(params), "
            f"and put the other's `inner` there."
        )


def _initial(inner: optax.GradientTransformation, params: Any) -> Any:
    """Return the first state of the script's own transformation."""
    first = inner.init(params)
    if states.find_all(first):
        raise ampx.AlreadyWrappedError(
            "wrap_optimizer got a transformation with a part that is wrapped already; its gradients would be "
            "unscaled twice. Use the object that the first call returned, or wrap only the whole."
        )
    return first


def disabled(inner: Transformation, max_norm: float | None, max_value: float | None) -> Transformation:
    """Return what a disabled session makes of a transformation: it clips, and notes that there was an update."""

    def init(params: Any) -> DisabledState:
        return states.make_disabled(_initial(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, DisabledState]:
        if max_norm is not None or max_value is not None:
            updates, _ = clip(updates, max_norm, max_value)
        updates, after = inner.update(updates, state.inner, params, **extra)
        return updates, states.make_disabled(after, stepped=True)

    return Transformation(init, update)


def scaled(tx: Transformation, group: ScaleGroup, plan: CastPlan | None, axes: tuple[str, ...]) -> Transformation:
    """Return a transformation that unscales and checks gradients, and moves the scale; owns `packed` and `settings`."""
    level = "O1" if plan is None else plan.level

    def init(params: Any) -> AmpState:
        if level not in ("O2", "O3"):
            _check_parameters(params)
        wide = None if plan is None or plan.dtype == "float32" else in_float64(params)
        if wide is not None:
            callers.warn(f"{wide}.", ampx.PrecisionWarning)
        if plan is not None and level == "O3":
            params = prepare.lower(params, plan)
        state = tx.init(params)
        settings = state.settings.naming(masters.full(state.masters, params))
        return state._replace(packed=Numbers.first(settings, group.index).packed(), settings=settings)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AmpState]:
        last = state.numbers
        if not jax.tree.leaves(updates):
            nothing = last._replace(
                applied=False, finite=True, step_scale=last.scale, nonfinite=jnp.zeros_like(last.nonfinite)
            )
            return updates, state._replace(packed=nothing.packed())
        states.check_scaled(state.settings)
        if level == "O3" and params is not None:
            _check_prepared(params)
        if not state.settings.parameters:  # `optax.tree_map_params` has taken the names out
            named = state.settings.naming(updates if params is None else masters.full(state.masters, params))
            if len(named.parameters) == last.nonfinite.shape[-1]:
                state = state._replace(settings=named)
        gradients, finite = unscale(updates, last.scale, widen=state.masters is not None)
        for axis in axes:
            finite = jax.lax.pmin(finite.astype(jnp.int32), axis) > 0
        state = state._replace(packed=last.following(state.settings.config, finite))
        updates, state = tx.update(gradients, state, params, **extra)
        return updates, state._replace(packed=state.numbers.packed())

    return Transformation(init, update)


def _check_parameters(params: Any) -> None:
    low = sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params) if masters.is_low(leaf)})
    if low:
        raise ampx.LowPrecisionParametersError(
            f"init of a wrapped optimizer got parameters of dtype {', '.join(low)}, in which small updates are lost; "
            f"accepted: float32 parameters. Keep them in float32 and let autocast compute in low precision, or use "
            f"level='O2', which keeps float32 copies."
        )


def _check_prepared(params: Any) -> None:
    leaves = jax.tree.leaves(params)
    if any(map(is_floating, leaves)) and not any(map(masters.is_low, leaves)):
        raise ampx.ProtocolError(
            "update of a wrapped optimizer got float32 parameters only, and level='O3' has them in low precision; "
            "accepted: what prepare returned. Call params = ampx.prepare(params) first."
        )


def clipped(tx: Transformation, max_norm: float | None, max_value: float | None) -> Transformation:
    """Return a transformation of clipped gradients; owns `grad_norm`."""
    if max_norm is None and max_value is None:
        return tx

    def init(params: Any) -> AmpState:
        state = tx.init(params)
        return state if max_norm is None else state._replace(grad_norm=jnp.zeros((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AmpState]:
        numbers = state.numbers.counting(updates)  # not where the step is skipped: both would be kept for that
        updates, norm = clip(updates, max_norm, max_value)
        norm = state.grad_norm if norm is None else norm
        return tx.update(updates, state._replace(packed=numbers, grad_norm=norm), params, **extra)

    return Transformation(init, update)


def skipping(inner: Transformation, settings: Settings, axes: tuple[str, ...], counted: bool) -> Transformation:
    """Return a transformation that changes nothing where gradients are not finite; owns `inner`.

    How many elements are not finite is counted there, too, which costs other steps nothing; unless it was before.
    """

    def init(params: Any) -> AmpState:
        return states.make(settings, _initial(inner, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AmpState]:
        numbers = state.numbers

        def run() -> tuple[Any, Any]:
            seen = masters.full(state.masters, params)
            updated, after = inner.update(updates, state.inner, seen, **extra)
            return updated, (after, jnp.zeros_like(numbers.nonfinite))

        def skip() -> Any:
            nonfinite = (numbers if counted else numbers.counting(updates)).nonfinite
            for axis in axes:
                nonfinite = jax.lax.pmax(nonfinite, axis)
            return state.inner, nonfinite

        updated, (after, nonfinite) = apply_or_skip(numbers.finite, run, skip)
        return updated, state._replace(packed=numbers._replace(nonfinite=nonfinite), inner=after)

    return Transformation(init, update)


def apply_or_skip(finite: Any, run: Callable[[], tuple[Any, Any]], skip_to: Callable[[], Any]) -> tuple[Any, Any]:
    """Run an update where gradients are finite, else return updates that change nothing, and what `skip_to` returns.

    Sync: outside of compiled code, one. A switch there would be compiled anew in every step.
    """

    def skip() -> tuple[Any, Any]:
        shapes = jax.eval_shape(run)
        unchanged = jax.tree.map(lambda shape, old: jnp.asarray(old, shape.dtype), shapes[1], skip_to())
        return jax.tree.map(_nothing, shapes[0]), unchanged

    if not isinstance(finite, jax.core.Tracer):
        return run() if finite else skip()
    # XLA lets the last branch write to the memory of the old state, and copies what the others return: with the update
    # before the skip, a step of large embeddings takes three times as long on a CPU.
    return varying.switch(finite.astype(jnp.int32), [skip, run])


def _nothing(shape: Any) -> Any:
    # Adding -0.0 leaves every number as it is; adding 0.0 would turn -0.0 into 0.0.
    return varying.full(shape, -0.0 if jnp.issubdtype(shape.dtype, jnp.floating) else 0)
