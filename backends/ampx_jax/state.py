"""The optimizer state that carries a loss scale."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ampx
from ampx.backend import ScaleValue
from ampx.scale_state import LossScale, LossScaleState

jax.tree_util.register_dataclass(
    ampx.StepResult, data_fields=[field.name for field in fields(ampx.StepResult)], meta_fields=[]
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Settings:
    """What is known when a function is traced: part of the state's structure, not one of its arrays.

    Attributes:
        config: The loss scale's configuration.
        enabled: False: the transformation is transparent.
    """

    config: LossScale
    enabled: bool


class AmpState(NamedTuple):
    """The state of a wrapped transformation; all numbers are scalar arrays.

    Attributes:
        scale: float32, factor for the next loss.
        growth_tracker: int32, finite steps since the scale last changed or overflowed.
        hysteresis_tracker: int32, overflows still tolerated before backoff.
        consecutive_skips: int32, overflows in a row up to now.
        steps: int32, counted steps.
        group: int32, position in the order of wrapping.
        applied: bool, the last step ran the inner transformation.
        finite: bool, the last step's gradients were finite.
        step_scale: float32, loss scale of the last step's gradients; 0 before the first.
        grad_norm: float32, L2 norm of the last step's true gradients; None where nothing clips by norm.
        settings: Configuration; no array.
        inner: The state of the transformation that was wrapped.
    """

    scale: Any
    growth_tracker: Any
    hysteresis_tracker: Any
    consecutive_skips: Any
    steps: Any
    group: Any
    applied: Any
    finite: Any
    step_scale: Any
    grad_norm: Any
    settings: Settings
    inner: Any


def make(settings: Settings, group: int, norm: bool, inner: Any) -> AmpState:
    """Return the state before the first step; every array has a buffer of its own, so that all can be donated."""
    _register_with_flax()
    return AmpState(
        **as_arrays(settings.config.initial_state()),
        steps=jnp.zeros((), jnp.int32),
        group=jnp.array(group, jnp.int32),
        applied=jnp.array(False),
        finite=jnp.array(True),
        step_scale=jnp.zeros((), jnp.float32),
        grad_norm=jnp.zeros((), jnp.float32) if norm else None,
        settings=settings,
        inner=inner,
    )


def as_arrays(state: LossScaleState) -> dict[str, Any]:
    """Return a loss scale as scalar arrays by name, in the order of its fields."""
    return {
        "scale": jnp.array(state.scale, jnp.float32),
        "growth_tracker": jnp.array(state.growth_tracker, jnp.int32),
        "hysteresis_tracker": jnp.array(state.hysteresis_tracker, jnp.int32),
        "consecutive_skips": jnp.array(state.consecutive_skips, jnp.int32),
    }


def loss_scale_state(state: AmpState) -> LossScaleState:
    """Return the part that the specification speaks of, as arrays."""
    return LossScaleState(state.scale, state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips)


def _is_own(node: Any) -> bool:
    return isinstance(node, AmpState)


def find_all(tree: Any) -> list[AmpState]:
    """List the states of wrapped transformations inside anything that JAX takes for a tree."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_own) if _is_own(leaf)]


def _check_surroundings(tree: Any) -> None:
    """Refuse what must not stand around a wrapped transformation, because an overflow would end training for good.

    Raises:
        UnsupportedByBackendError: Something around it keeps overflows from it, stores scaled gradients, or gets some of
            the scaled gradients in its place.
    """

    def visit(node: Any) -> bool:
        trouble = None
        if isinstance(node, optax.ApplyIfFiniteState) and find_all(node.inner_state):
            trouble = (
                "optax.apply_if_finite stands around the wrapped transformation and keeps overflows from it, so that "
                "its scale does not fall; accepted: the wrapped transformation alone, which skips them itself. Leave "
                "apply_if_finite out"
            )
        elif isinstance(node, optax.MultiStepsState):
            if jax.tree.leaves(node.skip_state) and find_all(node.inner_opt_state):
                trouble = (
                    "optax.MultiSteps stands around the wrapped transformation, and its should_skip_update_fn keeps "
                    "overflows from it, so that its scale does not fall; accepted: MultiSteps without that function. "
                    "To leave out micro batches, write wrap_optimizer(MultiSteps(tx, k).gradient_transformation())"
                )
        elif isinstance(node, optax.PartitionState):
            parts = list(node.inner_states.values())
            if find_all(parts) and any(_works_on(part) for part in parts):
                trouble = (
                    "a part of optax.partition is wrapped, and another part would get the scaled gradients as they "
                    "are; accepted: the whole wrapped. Write wrap_optimizer(optax.partition(...))"
                )
        elif type(node) is tuple:
            trouble = _trouble_in_chain(node)
        if trouble is not None:
            raise ampx.UnsupportedByBackendError(f"{trouble}.")
        return _is_own(node)

    jax.tree.leaves(tree, is_leaf=visit)


def _works_on(state: Any) -> bool:
    """Return whether the part of the gradients that belongs to a mask goes on, but not through the wrapper."""
    masked = isinstance(state, optax.MaskedState)
    return masked and not find_all(state) and not isinstance(state.inner_state, optax.EmptyState)


def _trouble_in_chain(states: tuple[Any, ...]) -> str | None:
    for place, part in enumerate(states):
        if not find_all(part):
            continue
        if isinstance(part, optax.MaskedState) and any(map(_works_on, states)):
            return (
                "the wrapped transformation stands in optax.masked, and another masked one would get the scaled "
                "gradients as they are; accepted: the whole wrapped. Write wrap_optimizer(optax.chain(...))"
            )
        storing = [type(state).__name__ for state in states[:place] if _stores_gradients(state)]
        if storing:
            return (
                f"optax.chain has a transformation in front of the wrapped one ({', '.join(storing)}) that stores "
                f"scaled gradients: it would mix scales, and keep an overflow for good; accepted: only what stores "
                f"nothing in front. Write wrap_optimizer(optax.chain(...))"
            )
    return None


def _stores_gradients(state: Any) -> bool:
    own = type(state).__module__.partition(".")[0] == "optax" or type(state) is tuple
    return own and any(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(state))


def read(tree: Any) -> ScaleValue | None:
    """Find the loss scale in an optimizer state, a train state, or whatever holds one.

    Raises:
        UnsupportedByBackendError: There are several, or something around the wrapped transformation is unsound.

    Sync: one, unless traced.
    """
    found = find_all(tree)
    if not found:
        return None
    if len(found) > 1:
        raise ampx.UnsupportedByBackendError(
            f"the optimizer state holds {len(found)} loss scales, and a loss can only be multiplied by one; accepted: "
            f"one. Wrap the whole transformation once, for instance wrap_optimizer(optax.partition(...))."
        )
    (state,) = found
    if state.settings.enabled:
        _check_surroundings(tree)
    numbers = _numbers_of(state)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(numbers))
    if not traced:
        numbers = jax.tree.map(_number, jax.device_get(numbers))
    result: ampx.StepResult | None = ampx.StepResult(
        applied=numbers.applied,
        finite=numbers.finite,
        scale=numbers.step_scale,
        next_scale=numbers.scale,
        consecutive_skips=numbers.consecutive_skips,
        # A step that was not applied has no norm. Under vmap there are several, and under a trace nobody knows yet.
        grad_norm=None if numbers.applied is False else numbers.grad_norm,
    )
    if not traced and isinstance(numbers.step_scale, float) and numbers.step_scale == 0.0:
        result = None
    elif not state.settings.enabled:
        result = ampx.events.UNCHECKED
    return ScaleValue(
        config=state.settings.config,
        enabled=state.settings.enabled,
        traced=traced,
        state=loss_scale_state(numbers),
        result=result,
        group=numbers.group,
        steps=numbers.steps,
    )


def _numbers_of(state: AmpState) -> AmpState:
    """Return the state without the inner one; each number is an array, also where flax nnx holds it in a variable."""
    fields = {
        name: jax.tree.leaves(value)[0]
        for name, value in state._asdict().items()
        if name not in ("settings", "inner") and value is not None
    }
    return state._replace(inner=None, **fields)


def _number(leaf: Any) -> Any:
    """Return a Python number for a scalar; what `vmap` or `scan` stacked stays an array."""
    return leaf.item() if leaf.ndim == 0 else leaf


def write(tree: Any, config: LossScale, scale: LossScaleState) -> Any:
    """Return the same tree with another loss scale in it; arrays stay where they were."""

    def replace(node: Any) -> Any:
        if not _is_own(node):
            return node
        fields = {
            name: jax.tree.map(functools.partial(_in_place_of, array), getattr(node, name))
            for name, array in as_arrays(scale).items()
        }
        return node._replace(**fields, settings=Settings(config, node.settings.enabled))

    return jax.tree.map(replace, tree, is_leaf=_is_own)


def _in_place_of(array: Any, old: Any) -> Any:
    if not isinstance(old, jax.Array) or isinstance(old, jax.core.Tracer):
        return array
    return jax.device_put(jnp.broadcast_to(array, old.shape), old.sharding)


def _register_with_flax() -> None:
    """Register with flax, where it is used, that the settings are no data: checkpoints hold the arrays."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        serialization.register_serialization_state(
            Settings, lambda settings: {}, lambda settings, state: settings, override=True
        )
