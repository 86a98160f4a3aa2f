"""`wrap_optimizer` for optax: unscale, check, apply or skip, move the scale; all in traceable code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx import callers
from ampx.backend import CastPlan
from ampx.protocol import ScaleGroup
from ampx.scale_state import next_state

from . import masters, meter, prepare, state as states, varying
from .accumulation import let_multi_steps_recover
from .casting import in_float64
from .state import AmpState, DisabledState, Settings


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


def wrap(
    inner: optax.GradientTransformation, group: ScaleGroup, options: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
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
    enabled, position = group.enabled, group.index
    max_grad_norm, max_grad_value = options["max_grad_norm"], options["max_grad_value"]
    clips = max_grad_norm is not None or max_grad_value is not None
    axes = options.get("axis_name")
    axes = () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    plan: CastPlan | None = options["plan"] if enabled else None
    level = "O1" if plan is None else plan.level
    compute = "float32" if plan is None else plan.dtype
    settings = Settings(group.config, enabled, compute=compute)

    def init(params: Any) -> AmpState | DisabledState:
        if enabled and level not in ("O2", "O3"):
            _check_parameters(params)
        wide = None if compute == "float32" else in_float64(params)
        if wide is not None:
            callers.warn(f"{wide}.", ampx.PrecisionWarning)
        copies = masters.make(params, plan) if plan is not None and level == "O2" else None
        whole = params if copies is None else masters.full(copies, params)
        if plan is not None and level == "O3":
            whole = prepare.lower(params, plan)
        first = inner.init(whole)
        if states.find_all(first):
            raise ampx.AlreadyWrappedError(
                "wrap_optimizer got a transformation with a part that is wrapped already; its gradients would be "
                "unscaled twice. Use the object that the first call returned, or wrap only the whole."
            )
        if not enabled:
            return states.make_disabled(first)
        # The branch that looks keeps values in memory that XLA would fuse away, in every step: where no update can be
        # lost it is left out, unless it is asked for.
        metered = group.meter_every > 0 and (group.meter_asked or level == "O3")
        return states.make(settings.naming(whole), position, max_grad_norm is not None, metered, copies, first)

    def update_disabled(
        updates: Any, state: DisabledState, params: Any = None, **extra: Any
    ) -> tuple[Any, DisabledState]:
        if clips:
            updates, _ = clip(updates, max_grad_norm, max_grad_value)
        updates, after = inner.update(updates, state.inner, params, **extra)
        return updates, states.make_disabled(after, stepped=True)

    def update(updates: Any, state: AmpState, params: Any = None, **extra: Any) -> tuple[Any, AmpState]:
        last = state.numbers
        if not jax.tree.leaves(updates):
            nothing = last._replace(
                applied=False, finite=True, step_scale=last.scale, nonfinite=jnp.zeros_like(last.nonfinite)
            )
            return updates, state._replace(packed=nothing.packed())
        states.check_scaled(state.settings)
        copies = None if state.masters is None else masters.followed(state.masters, params)
        if level == "O3" and params is not None:
            _check_prepared(params)
        grads, finite = unscale(updates, last.scale, widen=copies is not None)
        true = grads
        for axis in axes:
            finite = jax.lax.pmin(finite.astype(jnp.int32), axis) > 0
        norm = state.grad_norm
        # Counted where the step is skipped: that costs other steps nothing. Of clipped gradients it would keep both.
        counts = count_nonfinite(true) if clips else None
        if clips:
            grads, measured = clip(grads, max_grad_norm, max_grad_value)
            norm = norm if measured is None else measured
        seen = params if copies is None else masters.full(copies, params)
        if not state.settings.parameters:  # `optax.tree_map_params` has taken the names out
            named = state.settings.naming(updates if seen is None else seen)
            if len(named.parameters) == last.nonfinite.shape[-1]:
                state = state._replace(settings=named)
        steps = last.steps + 1
        every = 0 if state.meter is None or params is None else group.meter_every

        def run() -> tuple[Any, Any]:
            updates, after = inner.update(grads, state.inner, seen, **extra)
            return updates, (after, jnp.zeros_like(last.nonfinite))

        def skip() -> Any:
            nonfinite = count_nonfinite(true) if counts is None else counts
            # A part of the gradients may be left out, of which the names are not known.
            if len(nonfinite) != last.nonfinite.shape[-1]:
                nonfinite = jnp.zeros_like(last.nonfinite)
            for axis in axes:
                nonfinite = jax.lax.pmax(nonfinite, axis)
            return state.inner, nonfinite

        def look() -> Any:
            leaves = _looked_at(params, seen, returned, true)
            same = len(leaves) == len(state.settings.parameters)
            return meter.look(state.meter, steps, last.scale, compute, leaves) if same else state.meter

        returned, (after, nonfinite) = apply_or_skip(finite, run, skip)
        # What it looks at is in memory by now: in the branch that updates, XLA would fuse less in every step.
        looks = finite & (steps % every == 0) if every else None
        numbers = state.meter if looks is None else varying.switch(looks.astype(jnp.int32), [lambda: state.meter, look])
        if isinstance(looks, jax.core.Tracer):
            returned = jax.tree.map(functools.partial(_after_meter, numbers), returned)
        if copies is not None:
            returned, copies = masters.step(returned, state.masters, copies, params, finite)
        moved = next_state(state.settings.config, last.loss_scale, finite, where=_where)
        now = states.Numbers(
            **states.as_arrays(moved),
            steps=steps,
            skipped=last.skipped + (~finite).astype(jnp.int32),
            group=last.group,
            applied=finite,
            finite=finite,
            step_scale=last.scale,
            nonfinite=nonfinite,
        )
        return returned, AmpState(now.packed(), norm, numbers, state.settings, copies, after)

    return optax.GradientTransformationExtraArgs(init, Update(update if enabled else update_disabled, inner, group))


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


def _where(condition: Any, if_true: Any, if_false: Any) -> Any:
    # Python numbers must not widen what they meet: a weak type follows the other side.
    return jnp.where(condition, if_true, if_false)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def unscale(grads: Any, scale: Any, widen: bool = False) -> tuple[Any, Any]:
    """Divide floating gradients by the scale, in float32 or wider; return them, and whether all are finite.

    With `widen` they stay as wide as that, else they get their own dtypes again.
    """

    def divide(leaf: Any) -> Any:
        if not _is_inexact(leaf):
            return leaf
        dtype = jnp.result_type(leaf)
        true = leaf.astype(jnp.promote_types(dtype, jnp.float32)) / scale
        finite.append(_is_finite(true))
        return true if widen else true.astype(dtype)

    finite: list[Any] = []
    return jax.tree.map(divide, grads), functools.reduce(jnp.logical_and, finite, jnp.array(True))


def all_finite(grads: Any) -> Any:
    """Return whether no gradient has an element that is not finite."""
    return unscale(grads, jnp.float32(1.0))[1]


def _is_finite(leaf: Any) -> Any:
    """Return whether all elements are finite: whether the bits of the largest of either sign are those of a number.

    Two numbers at once, since XLA makes one loop of that, which reads the gradient and divides it. A single sum or
    maximum it cuts up on CPUs, into up to five loops with arrays in between.
    """
    if jnp.iscomplexobj(leaf):
        return _is_finite(leaf.real) & _is_finite(leaf.imag)
    signed, unsigned = (np.int64, np.uint64) if leaf.dtype.itemsize == 8 else (np.int32, np.uint32)
    limits = [np.asarray(sign * np.inf, leaf.dtype).view(kind)[()] for sign, kind in ((1, signed), (-1, unsigned))]
    # As signed integers all negative numbers are less than the positive ones, and as unsigned ones greater.
    largest = jax.lax.reduce(
        tuple(jax.lax.bitcast_convert_type(leaf, kind) for kind in (signed, unsigned)),
        (signed(np.iinfo(signed).min), unsigned(0)),
        _larger,
        tuple(range(leaf.ndim)),
    )
    return (largest[0] < limits[0]) & (largest[1] < limits[1])


def _larger(numbers: Any, others: Any) -> Any:
    # JAX keeps what it compiled as long as the function stays the same.
    return tuple(map(jnp.maximum, numbers, others))


def count_nonfinite(grads: Any) -> Any:
    """Return how many elements of each gradient are not finite: int32, one number a gradient."""
    return jnp.stack([_count_nonfinite(leaf) for leaf in jax.tree.leaves(grads)])


def _count_nonfinite(leaf: Any) -> Any:
    """Return how many elements are not finite, of one row at most 2**24."""
    if not _is_inexact(leaf):
        return jnp.int32(0)
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    rows = jnp.sum((~jnp.isfinite(leaf)).astype(jnp.float32), axis=-1 if jnp.ndim(leaf) else None)
    return jnp.sum(rows.astype(jnp.int32))


def _is_inexact(leaf: Any) -> bool:
    # jax.grad(..., allow_int=True) gives gradients of dtype float0, which is a kind of bool.
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def clip(grads: Any, max_norm: float | None, max_value: float | None) -> tuple[Any, Any]:
    """Clip unscaled gradients by value, then by global L2 norm; return them and the norm before, or None.

    The norm is float32, and infinite only where float32 cannot hold it.
    """

    def each(function: Callable[[Any], Any], tree: Any) -> Any:
        return jax.tree.map(lambda leaf: function(leaf) if _is_inexact(leaf) else leaf, tree)

    if max_value is not None:
        grads = each(lambda leaf: jnp.clip(leaf, -max_value, max_value), grads)
    if max_norm is None:
        return grads, None
    leaves = [leaf for leaf in jax.tree.leaves(grads) if _is_inexact(leaf)]
    plain = _norm(leaves, jnp.float32(1.0))

    def shifted() -> tuple[Any, Any]:
        # Squares of large elements overflow, though every element is finite. 16: the quotient must not underflow.
        shift = 16.0 / _largest(leaves)
        return shift, _norm(leaves, shift)

    shift, norm = varying.switch(
        jnp.isfinite(plain).astype(jnp.int32), [shifted, lambda: (jnp.ones_like(plain), plain)]
    )
    factor = jnp.where(plain > max_norm, max_norm / norm, 1.0)
    clipped = each(lambda leaf: (leaf * shift * factor).astype(leaf.dtype), grads)
    return clipped, (norm / shift).astype(jnp.float32)


def _norm(leaves: list[Any], factor: Any) -> Any:
    """Return the L2 norm over all leaves times a factor, in float32 or wider."""
    total = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) * factor
        total = total + jnp.sum(jnp.real(leaf * jnp.conj(leaf)))
    return jnp.sqrt(total)


def _largest(leaves: list[Any]) -> Any:
    """Return the largest magnitude over all leaves, in float32 or wider."""
    largest = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(leaf), initial=0))
    return largest


def _looked_at(params: Any, seen: Any, updates: Any, grads: Any) -> list[meter.Leaf | None]:
    """List what the meter looks at."""
    leaves: list[meter.Leaf | None] = []

    def note(param: Any, before: Any, update: Any, grad: Any) -> None:
        if not all(leaf is not None and _is_floating(leaf) for leaf in (param, update, grad)):
            leaves.append(None)
            return
        add = functools.partial(_sum if before.dtype == param.dtype else masters.after, param.dtype)
        param, before, update, grad = map(varying.unsharded, (param, before, update, grad))
        leaves.append(meter.Leaf(param, before, update, grad, add))

    jax.tree.map(note, params, seen, updates, grads)
    return leaves


def _after_meter(numbers: Any, update: Any) -> Any:
    """Return the update as it is, in a form that says to the compiler that the meter has looked.

    Nothing else orders the look before the addition that overwrites a parameter, and XLA would keep a copy of every
    parameter in every step. A barrier it has dropped by then. The first number is a step, which is never negative.
    """
    if not _is_floating(update) or not varying.follows(update, numbers):
        return update
    return jnp.where(numbers[0] >= 0, update, jnp.asarray(-0.0, update.dtype))


def _sum(dtype: Any, param: Any, before: Any, update: Any) -> Any:
    """Return what `optax.apply_updates` makes of a parameter."""
    return (param + update).astype(dtype).astype(jnp.float32)


def apply_or_skip(finite: Any, run: Callable[[], tuple[Any, Any]], skip_to: Callable[[], Any]) -> tuple[Any, Any]:
    """Run an update, or return updates that change nothing.

    Args:
        finite: Whether it runs.
        run: Returns updates and what comes with them.
        skip_to: Returns what comes with them where it does not run.

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
    if any(map(_is_floating, leaves)) and not any(map(masters.is_low, leaves)):
        raise ampx.ProtocolError(
            "update of a wrapped optimizer got float32 parameters only, and level='O3' has them in low precision; "
            "accepted: what prepare returned. Call params = ampx.prepare(params) first."
        )
