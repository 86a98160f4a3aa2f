"""What the host reads in an optimizer state and writes there: the loss scale, the last step, the float32 copies."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx.protocol import Handle, ScaleGroup, refuse_values
from ampx.session import new_group

from . import masters, meter
from .casting import is_array
from .state import AmpState, DisabledState, find_all, is_own, note_read, repacked

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter


class StateHandle(Handle):
    """The loss scale in an optimizer state, a train state, or whatever holds one."""

    def __init__(self, tree: Any, call: str) -> None:
        """Read it.

        Sync: one, unless traced.
        """
        state = _find(tree, call)
        self._tree, self._call, self._settings = tree, call, state.settings
        self.masters = state.masters
        self._stepped = isinstance(state, DisabledState) and (state.stepped or _is_counted(tree))
        self._traced = False
        if isinstance(state, AmpState):
            _check_surroundings(tree)
            # Each a plain array, also where flax nnx holds it in a variable.
            counted = {
                name: jax.tree.leaves(value)[0]
                for name, value in state._asdict().items()
                if name in ("packed", "grad_norm", "meter") and value is not None
            }
            self._traced = any(isinstance(leaf, jax.core.Tracer) for leaf in counted.values())
            state = state._replace(**(counted if self._traced else jax.device_get(counted)))
        self._numbers = state.numbers if self._traced else jax.tree.map(_number, state.numbers)
        self._grad_norm = state.grad_norm if self._traced else jax.tree.map(_number, state.grad_norm)
        self._meter = state.meter

    @property
    def ampx_enabled(self) -> bool:
        """False where a disabled session wrapped."""
        return self._settings.enabled

    @property
    def loss_scale(self) -> Any:
        """The current loss scale; where it is traced, or `vmap` stacked several, an array."""
        note_read(self._settings)
        return self._numbers.scale

    @property
    def last_step(self) -> ampx.StepResult | None:
        """What the last step did; where it is traced, arrays, and before the first step `scale` is 0."""
        if not self._settings.enabled:
            return ampx.events.UNCHECKED if self._stepped else None
        numbers = self._numbers
        if not self._traced and isinstance(numbers.step_scale, float) and numbers.step_scale == 0.0:
            return None
        return ampx.StepResult(
            applied=numbers.applied,
            finite=numbers.finite,
            scale=numbers.step_scale,
            next_scale=numbers.scale,
            consecutive_skips=numbers.consecutive_skips,
            # A step that was not applied has no norm. Under vmap there are several; under a trace it is not known yet.
            grad_norm=None if numbers.applied is False else self._grad_norm,
        )

    @property
    def ampx_nonfinite(self) -> list[tuple[str, int, int]]:
        """The parameters whose last gradients were not finite: name, such elements, elements; empty under a trace.

        Where `optax.tree_map_params` has taken the names out, up to the next update, they are called by their places,
        with 0 elements.
        """
        if self._traced:
            return []
        counts = np.asarray(self._numbers.nonfinite)
        counts = counts.reshape(-1, counts.shape[-1]).sum(0).tolist()  # `vmap` stacks several states
        parameters = self._settings.parameters or [(f"parameter {place}", 0, "") for place in range(len(counts))]
        rows = zip(parameters, counts, strict=True)
        return [(name, count, elements) for (name, elements, _), count in rows if count]

    @property
    def meter(self) -> Meter | None:
        """The last update that was looked at; None before, where `vmap` stacked several states, and without names.

        Raises:
            ProtocolError: The state is traced.
        """
        self._check_untraced()
        parameters = self._settings.parameters
        if self._meter is None or self._meter.ndim != 1 or not parameters:
            return None
        return meter.reading(np.asarray(self._meter), self._settings.compute, parameters)

    @functools.cached_property
    def ampx_group(self) -> ScaleGroup:
        """The host's view.

        Raises:
            ProtocolError: The state is traced.
        """
        self._check_untraced()
        group = new_group("jax", self._settings.config, self._settings.enabled)
        group.index, group.states[0] = self._numbers.group, self._numbers.loss_scale
        return group

    def _check_untraced(self) -> None:
        if self._traced:
            call = self._call.removeprefix("load_")
            raise ampx.ProtocolError(
                f"{call} was called inside traced code, where numbers are not known; accepted: a state outside of it. "
                f"Call it after the compiled function has returned."
            )

    def ampx_observe(self, sent: dict[int, int]) -> ampx.StepResult | None:
        """Send the events of the last step, and return its result: steps run in compiled code, which sends nothing."""
        group, result, steps = self.ampx_group, self.last_step, self._numbers.steps
        since = sent.get(group.index, 0)
        if result is None or not group.enabled or since == steps:
            return result
        sent[group.index] = steps
        after = group.states[0]
        before = dataclasses.replace(after, scale=result.scale)
        labels = ("jax", group.index, 0, steps)
        for event in group.events_of(labels, before, after, bool(result.finite)):
            if isinstance(event, ampx.ScaleCollapsed):
                event = dataclasses.replace(event, parameters=tuple(name for name, _, _ in self.ampx_nonfinite))
            group.send(event)
        if group.observer is not None and group.observer.is_due(steps, since if since < steps else None):
            skips, skipped, norm = after.consecutive_skips, self._numbers.skipped, result.grad_norm
            group.send(ampx.Progress(*labels, result.scale, after.scale, skips, skipped, norm))
        last = self.meter
        if last is not None and last.step > since:
            from ampx.numerics.meter import report  # who metered has it

            report(group, last.step, last.lost, last.flushed, last.headroom)
        return result

    def ampx_unscale(self) -> NoReturn:
        """Refuse: only `update` sees the gradients."""
        refuse_values("unscale", "jax", "update")

    def ampx_clip_grad_norm(self, max_norm: float) -> NoReturn:
        """Refuse: only `update` sees the gradients."""
        refuse_values("clip_grad_norm", "jax", "update")

    def ampx_reloaded(self) -> Any:
        """Return the same tree with the group's loss scale in it; arrays stay where they were."""
        config, first = self.ampx_group.config, self.ampx_group.states[0]

        def replace(node: Any) -> Any:
            if not isinstance(node, AmpState):
                return node
            settings = dataclasses.replace(node.settings, config=config)
            packed = jax.tree.map(lambda old: repacked(old, first), node.packed)
            return node._replace(packed=packed, settings=settings)

        return jax.tree.map(replace, self._tree, is_leaf=is_own)


def _find(tree: Any, call: str) -> AmpState | DisabledState:
    """Return the only state of a wrapped transformation in a tree.

    Raises:
        UnsupportedByBackendError: The call needs a state, and got none; or there are several.
        NotWrappedError: There is none.
    """
    if tree is None and call.endswith("state_dict"):
        raise ampx.UnsupportedByBackendError(
            "state_dict and load_state_dict need the optimizer state, because backend 'jax' keeps the loss scale "
            "there and not in the session; accepted: amp.state_dict(opt_state), opt_state = amp.load_state_dict(d, "
            "opt_state). Pass it."
        )
    states = find_all(tree)
    if not states:
        raise ampx.NotWrappedError(
            f"{call} got {type(tree).__name__}, which an optimizer that wrap_optimizer did not return has made; "
            f"accepted: the state that a wrapped optimizer's init or update gave. Call "
            f"tx = ampx.wrap_optimizer(tx) first and pass its state."
        )
    if len(states) > 1:
        raise ampx.UnsupportedByBackendError(
            f"the optimizer state holds {len(states)} loss scales, and a loss can only be multiplied by one; "
            f"accepted: one. Wrap the whole transformation once, for instance "
            f"wrap_optimizer(optax.partition(...))."
        )
    return states[0]


def _check_surroundings(tree: Any) -> None:
    """Refuse transformations that must not enclose a wrapped one: after an overflow they would never update again.

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
        return is_own(node)

    jax.tree.leaves(tree, is_leaf=visit)


def _works_on(state: Any) -> bool:
    """Return whether the part of the gradients that belongs to a mask goes on, but not through the wrapper."""
    masked = isinstance(state, optax.MaskedState)
    return masked and not find_all(state) and not isinstance(state.inner_state, optax.EmptyState)


def _trouble_in_chain(states: tuple[Any, ...]) -> str | None:
    for place, part in enumerate(states):
        if not find_all(part):
            continue
        following = [type(state).__name__ for state in states[place + 1 :]]
        if following and find_all(part)[0].masters is not None:
            return (
                f"optax.chain has a transformation behind the wrapped one ({', '.join(following)}), which would change "
                f"what level='O2' adds to low-precision parameters, so that they part from their float32 copies; "
                f"accepted: the wrapped one last. Write wrap_optimizer(optax.chain(...))"
            )
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


def _is_counted(tree: Any) -> bool:
    """Return whether the transformation around a disabled session's state counts an update; under a trace, True.

    The state itself does not tell: flax nnx and `optax.MultiSteps` put the new arrays into the old structure.
    """
    nnx, counts = sys.modules.get("flax.nnx"), []

    def visit(node: Any) -> bool:
        if isinstance(node, optax.MultiStepsState) and find_all(node):
            counts.extend(jax.tree.leaves(node.gradient_step))
        elif nnx is not None and isinstance(node, nnx.Optimizer) and find_all(node):
            counts.extend(jax.tree.leaves(node.step))
        return False

    jax.tree.leaves(tree, is_leaf=visit)
    return bool(counts) and all(isinstance(count, jax.core.Tracer) or np.all(count) for count in counts)


def _number(leaf: Any) -> Any:
    """Return a Python number for a scalar; what `vmap` or `scan` stacked stays an array."""
    return np.asarray(leaf).item() if np.ndim(leaf) == 0 else leaf


def float32_parameters(params: Any, opt_state: Any) -> Any:
    """Return the parameters in float32, to save or to evaluate: the copies at O2, where there are some.

    Args:
        params: The parameters, as `prepare` returned them or `optax.apply_updates` since.
        opt_state: The state of the wrapped optimizer, or what holds one; it is that of these parameters.

    Returns:
        A tree like the parameters. Those without a copy are cast to float32, those that are no low-precision array stay
        as they are.

    Raises:
        NotWrappedError, UnsupportedByBackendError: The state holds no or several loss scales.
    """
    copies = StateHandle(opt_state, "float32_parameters").masters
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if is_array(leaf) and masters.is_low(leaf) else leaf, params
    )
    return masters.full(copies, wide)
