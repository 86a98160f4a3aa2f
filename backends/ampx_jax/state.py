"""The optimizer state that carries a loss scale."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ampx
from ampx.scale_state import LossScale, LossScaleState, is_one, next_state

from .casting import is_array
from .gradients import count_nonfinite

# What turns gradients into updates, and carries a state.
Transformation: TypeAlias = optax.GradientTransformationExtraArgs

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
        """Return these with the counts of elements that are not finite; zeros where gradients are left out."""
        counts = count_nonfinite(gradients)
        unknown = len(counts) != self.nonfinite.shape[-1]
        return self._replace(nonfinite=jnp.zeros_like(self.nonfinite) if unknown else counts)

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


def repacked(packed: Any, loss_scale: LossScaleState) -> Any:
    """Return packed numbers with another loss scale, where they were."""
    changed = np.array(packed)
    for name in _LOSS_SCALE:
        value = getattr(loss_scale, name)
        changed[..., _SCALARS.index(name)] = np.float32(value).view(np.int32) if name in _FLOATS else value
    # Only what was put somewhere by name: an array that is free goes to where the others of a step are.
    placed = isinstance(packed, jax.Array) and not isinstance(packed, jax.core.Tracer) and packed.committed
    return jax.device_put(changed, packed.sharding) if placed else jnp.asarray(changed)


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


def is_own(node: Any) -> bool:
    """Return whether this is the state of a wrapped transformation."""
    return isinstance(node, (AmpState, DisabledState))


def find_all(tree: Any) -> list[AmpState | DisabledState]:
    """List the states of wrapped transformations inside anything that JAX takes for a tree."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_own) if is_own(leaf)]


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
