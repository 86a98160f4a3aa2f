"""The optimizer state that carries a loss scale."""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx.protocol import Handle, PendingProgress, ScaleGroup, refuse_values
from ampx.scale_state import LossScale, LossScaleState, is_one, next_state
from ampx.session import new_group

from . import meter
from .casting import is_array
from .gradients import count_nonfinite

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

jax.tree_util.register_dataclass(
    ampx.StepResult, data_fields=[field.name for field in fields(ampx.StepResult)], meta_fields=[]
)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Settings:
    """What is known when a function is traced: part of the state's structure, not one of its arrays.

    Settings without parameters equal those with any: `optax.tree_map_params` compares, by their structure, a state with
    what `init` makes of a placeholder for all parameters. Its result has the structure of the latter, and the next
    update names the parameters again. Compiled functions tell the two apart by the shape of `packed`, or need not.
    """

    config: LossScale
    enabled: bool  # False: the transformation is transparent; see `DisabledState`
    # Their names, by the keys of their tree, elements, and the dtypes in which they are updated.
    parameters: tuple[tuple[str, int, str], ...] = ()
    compute: str = "float32"  # the compute dtype

    def __eq__(self, other: object) -> bool:
        """Return whether they are the same, but that parameters may be unknown."""
        if not isinstance(other, Settings):
            return NotImplemented
        same = (self.config, self.enabled, self.compute) == (other.config, other.enabled, other.compute)
        return same and (not self.parameters or not other.parameters or self.parameters == other.parameters)

    def __hash__(self) -> int:
        return hash((self.config, self.enabled, self.compute))

    def is_scaled(self) -> bool:
        """Return whether losses are multiplied by something else than 1."""
        return self.enabled and not is_one(self.config)

    def naming(self, parameters: Any) -> Settings:
        """Return these with the names, elements and dtypes of a tree of parameters."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(parameters)
        named = tuple((path_name(path), int(jnp.size(leaf)), str(jnp.result_type(leaf))) for path, leaf in leaves)
        return dataclasses.replace(self, parameters=named)


# The settings of the states whose loss scale was read, traced or not. For the life of the process: a function that was
# compiled for such a state is not traced again for states that JAX, by their settings, takes for the same.
_read: Final[list[Settings]] = []


def note_read(settings: Settings) -> None:
    """Remember that the loss scale of a state was read, to multiply a loss by."""
    if not any(settings == other and settings.parameters == other.parameters for other in _read):
        _read.append(settings)


def check_scaled(settings: Settings) -> None:
    """Refuse to divide gradients by a loss scale that nothing has read up to now.

    Raises:
        NotScaledError: Neither `scale_loss` nor `loss_scale` has read it, so that no loss can be multiplied by it.
    """
    if settings.is_scaled() and settings not in _read:
        raise ampx.NotScaledError(
            "update of a wrapped optimizer got gradients whose loss did not go through scale_loss: nothing has read "
            "the loss scale of this optimizer's state, by which update divides; accepted: gradients of the scaled "
            "loss. Differentiate what `with ampx.scale_loss(loss, opt_state) as scaled` yields. Gradients that come "
            "from elsewhere are to be multiplied by ampx.loss_scale(opt_state); call it before update is traced."
        )


class Numbers(NamedTuple):
    """What the state counts; scalars but for the last, or more dimensions where `vmap` or `scan` stacked several.

    Attributes:
        scale: float32, factor for the next loss.
        growth_tracker: int32, finite steps since the scale last changed or overflowed.
        hysteresis_tracker: int32, overflows still tolerated before backoff.
        consecutive_skips: int32, overflows in a row up to now.
        steps: int32, counted steps.
        skipped: int32, those of them that were not applied.
        group: int32, position in the order of wrapping.
        applied: bool, the last step ran the inner transformation.
        finite: bool, the last step's gradients were finite.
        step_scale: float32, loss scale of the last step's gradients; 0 before the first.
        nonfinite: int32, one number a parameter: the non-finite elements of its last gradient.
    """

    scale: Any
    growth_tracker: Any
    hysteresis_tracker: Any
    consecutive_skips: Any
    steps: Any
    skipped: Any
    group: Any
    applied: Any
    finite: Any
    step_scale: Any
    nonfinite: Any

    @classmethod
    def first(cls, settings: Settings, group: int = 0) -> Numbers:
        """Return the numbers before the first step, as Python's and NumPy's."""
        return cls(
            **dataclasses.asdict(settings.config.initial_state()),
            steps=0,
            skipped=0,
            group=group,
            applied=False,
            finite=True,
            step_scale=0.0,
            nonfinite=np.zeros(len(settings.parameters), np.int32),
        )

    @property
    def loss_scale(self) -> LossScaleState:
        """The part that the specification defines."""
        return LossScaleState(*self[: len(_LOSS_SCALE)])

    def following(self, config: LossScale, finite: Any) -> Numbers:
        """Return the numbers of the next step, whose gradients are finite or not; `nonfinite` stays as it is."""
        moved = next_state(config, self.loss_scale, finite, where=jnp.where)
        return Numbers(
            **as_arrays(moved),
            steps=self.steps + 1,
            skipped=self.skipped + (~finite).astype(jnp.int32),
            group=self.group,
            applied=finite,
            finite=finite,
            step_scale=self.scale,
            nonfinite=self.nonfinite,
        )

    def counting(self, gradients: Any) -> Numbers:
        """Return these with the elements of gradients that are not finite; with zeros where some gradients are absent.

        Then it is not known which.
        """
        counts = count_nonfinite(gradients)
        return self._replace(
            nonfinite=counts if len(counts) == self.nonfinite.shape[-1] else jnp.zeros_like(self.nonfinite)
        )

    def packed(self) -> Any:
        """Return one int32 array, in which floats lie as their bits.

        Compiled it is one kernel; a concatenation would be one for each number.
        """
        values = [_bits(value) if name in _FLOATS else value for name, value in zip(_SCALARS, self, strict=False)]
        packed = jnp.pad(jnp.asarray(self.nonfinite, jnp.int32), (len(values), 0))
        index = jax.lax.iota(jnp.int32, packed.size)
        for place, value in enumerate(values):
            packed = jnp.where(index == place, jnp.asarray(value, jnp.int32), packed)
        return packed


_SCALARS: Final = Numbers._fields[:-1]
_LOSS_SCALE: Final = tuple(field.name for field in fields(LossScaleState))
_FLOATS: Final = ("scale", "step_scale")
_FLAGS: Final = ("applied", "finite")


def _bits(value: Any) -> Any:
    return jax.lax.bitcast_convert_type(jnp.asarray(value, jnp.float32), jnp.int32)


class AmpState(NamedTuple):
    """The state of a wrapped transformation.

    Every array of a state costs each call of a compiled step some microseconds, so the small ones are one.

    Attributes:
        packed: `Numbers` as one int32 array, and themselves while an update goes on; None where the checkpoint of a
            disabled session was restored, until the next step.
        grad_norm: float32, L2 norm of the last step's unscaled gradients; None where nothing clips by norm.
        meter: int32, what `ampx_jax.meter` counted; None where it never looks.
        settings: Configuration; no array.
        masters: At O2 a tree like the parameters, with float32 copies of those that are of low precision and None for
            the others; else None.
        inner: The state of the transformation that was wrapped.
    """

    packed: Any
    grad_norm: Any
    meter: Any
    settings: Settings
    masters: Any
    inner: Any

    @property
    def numbers(self) -> Numbers:
        """What is packed: of an array on the host NumPy's, else JAX's; without one, what there is before a step.

        Raises:
            InvalidStateError: Something else is there.
        """
        if isinstance(self.packed, Numbers):
            return self.packed
        if self.packed is None:
            return Numbers.first(self.settings)
        leaves = jax.tree.leaves(self.packed)  # flax nnx holds it in a variable
        packed = leaves[0] if len(leaves) == 1 else self.packed
        if not _is_packed(packed):
            held = f"{packed.dtype} of shape {packed.shape}" if is_array(packed) else type(packed).__name__
            raise ampx.InvalidStateError(
                f"the optimizer state holds {held} where its loss scale and counts are; accepted: one int32 array, as "
                f"init of a wrapped optimizer makes it. Leave it as it is where you cast or replace parts of a state."
            )
        numpy = isinstance(packed, np.ndarray)
        values = []
        for place, name in enumerate(_SCALARS):
            value = packed[..., place]
            if name in _FLOATS:
                value = value.view(np.float32) if numpy else jax.lax.bitcast_convert_type(value, jnp.float32)
            values.append(value != 0 if name in _FLAGS else value)
        return Numbers._make([*values, packed[..., len(values) :]])


class NotStepped(tuple[()]):
    """Says that there was no update; compared as the empty tuple that it is, without a call in Python."""

    __slots__ = ()


class Stepped(NotStepped):
    """Says that there was an update; equal to the other, so that JAX compiles nothing anew after the first one."""

    __slots__ = ()


class DisabledState(tuple[tuple[Any, ...], NotStepped]):
    """The state of a transformation that a disabled session wrapped: an `AmpState` that has nothing but `inner`.

    Each call of a compiled step takes states apart, compares their structures, and puts new ones together. This is what
    JAX asks for then, a pair: the children, in the order of `AmpState`, and what else there is. So all but the putting
    together is done without Python, and settings are not compared.
    """

    __slots__ = ()
    packed: ClassVar[None] = None
    grad_norm: ClassVar[None] = None
    meter: ClassVar[None] = None
    settings: ClassVar[Settings] = Settings(LossScale(init_scale=1.0, dynamic=False), enabled=False)
    masters: ClassVar[None] = None

    def __repr__(self) -> str:
        return f"DisabledState(inner={self.inner!r}, stepped={self.stepped})"

    @property
    def inner(self) -> Any:
        """The state of the transformation that was wrapped."""
        return self[0][-1]

    @property
    def stepped(self) -> bool:
        """Whether there was an update."""
        return isinstance(self[1], Stepped)

    @property
    def numbers(self) -> Numbers:
        """What there is before a step."""
        return Numbers.first(self.settings)


def _flatten_with_keys(state: DisabledState) -> tuple[Any, NotStepped]:
    children, stepped = state
    keys = map(jax.tree_util.GetAttrKey, AmpState._fields)
    return list(zip(keys, children, strict=True)), stepped


jax.tree_util.register_pytree_with_keys(
    DisabledState, _flatten_with_keys, lambda stepped, children: DisabledState((children, stepped)), tuple
)


def _is_packed(leaf: Any) -> bool:
    return is_array(leaf) and leaf.dtype == jnp.int32 and leaf.ndim > 0 and leaf.shape[-1] >= len(_SCALARS)


def make(settings: Settings, inner: Any) -> AmpState:
    """Return a state without arrays of ampx; each that is added has a buffer of its own, so that all can be donated."""
    _register_with_flax()
    return AmpState(None, None, None, settings, None, inner)


def make_disabled(inner: Any, stepped: bool = False) -> DisabledState:
    """Return the state of a transformation that a disabled session wrapped."""
    _register_with_flax()
    children = (*(None for _ in AmpState._fields[:-1]), inner)
    return DisabledState((children, Stepped() if stepped else NotStepped()))


def path_name(path: Any) -> str:
    """Return the name of a leaf of a tree: its keys, with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")  # of a variable of flax nnx


def as_arrays(state: LossScaleState) -> dict[str, Any]:
    """Return a loss scale as scalar arrays by name, in the order of its fields."""
    return {
        "scale": jnp.array(state.scale, jnp.float32),
        "growth_tracker": jnp.array(state.growth_tracker, jnp.int32),
        "hysteresis_tracker": jnp.array(state.hysteresis_tracker, jnp.int32),
        "consecutive_skips": jnp.array(state.consecutive_skips, jnp.int32),
    }


def _is_own(node: Any) -> bool:
    return isinstance(node, (AmpState, DisabledState))


def find_all(tree: Any) -> list[AmpState | DisabledState]:
    """List the states of wrapped transformations inside anything that JAX takes for a tree."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_own) if _is_own(leaf)]


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


class StateHandle(Handle):
    """The loss scale in an optimizer state, a train state, or whatever holds one."""

    def __init__(self, tree: Any, call: str) -> None:
        """Find it.

        Sync: one, unless traced.
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
        (state,) = states
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
        for event in group.events_of(("jax", group.index, 0, steps), before, after, bool(result.finite)):
            if isinstance(event, ampx.ScaleCollapsed):
                event = dataclasses.replace(event, parameters=tuple(name for name, _, _ in self.ampx_nonfinite))
            group.send(event)
        if group.reports(steps, since if since < steps else None):
            pending = PendingProgress(steps, {0: result.scale}, {0: after}, {0: self._numbers.skipped}, ())
            for event in group.progress_of(pending, result.grad_norm):
                group.send(event)
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

        def place(old: Any) -> Any:
            packed = np.array(old)
            for name in _LOSS_SCALE:
                value = getattr(first, name)
                packed[..., _SCALARS.index(name)] = np.float32(value).view(np.int32) if name in _FLOATS else value
            # Only what was put somewhere by name: an array that is free goes to where the others of a step are.
            placed = isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer) and old.committed
            return jax.device_put(packed, old.sharding) if placed else jnp.asarray(packed)

        def replace(node: Any) -> Any:
            if not isinstance(node, AmpState):
                return node
            settings = dataclasses.replace(node.settings, config=config)
            return node._replace(packed=jax.tree.map(place, node.packed), settings=settings)

        return jax.tree.map(replace, self._tree, is_leaf=_is_own)


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


def _register_with_flax() -> None:
    """Register with flax, where it is used, that the settings are no data: checkpoints hold the arrays.

    Those of disabled sessions are like those of others, without the arrays that they lack.
    """
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return

    def save(state: DisabledState) -> Any:
        return serialization.to_state_dict(AmpState(None, None, None, state.settings, None, state.inner))

    def restore(state: DisabledState, saved: Any) -> DisabledState:
        # What was saved without ampx is the inner state itself.
        held = saved["inner"] if set(saved) == set(AmpState._fields) else saved
        inner = serialization.from_state_dict(state.inner, held, name="inner")
        return make_disabled(inner, state.stepped)

    serialization.register_serialization_state(
        Settings, lambda settings: {}, lambda settings, state: settings, override=True
    )
    serialization.register_serialization_state(DisabledState, save, restore, override=True)
