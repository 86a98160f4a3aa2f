"""What did no harm in a batch and may do some in another, as far as one batch shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from ampx.formats import FORMATS

from .batch import Seen
from .compare import bound, error_of, key_of, listed_names
from .operations import family
from .places import is_mask_constant
from .probe import Reading

# From this share on, gradients that flush to zero are a risk.
FLUSHED: Final = 0.1
FEW: Final = 16  # elements, of which no share is worth a word


@dataclass(frozen=True)
class Risk:
    """What does no harm in this batch and may do some in another.

    Attributes:
        kind: `"constant"`, `"loss"`, `"normalization"`, `"overflow"` or `"gradient"`.
        where: Names of modules or parameters.
        text: One sentence.
    """

    kind: Literal["constant", "loss", "normalization", "overflow", "gradient"]
    where: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class _Pair:
    """A batch in low precision and in float32.

    Attributes:
        low: In low precision.
        reference: In float32.
        dtype: The low precision.
        scale: The loss scale, of a batch whose gradients are those of its values; None for another.
    """

    low: Seen
    reference: Seen
    dtype: str
    scale: float | None


def risks(low: Seen, reference: Seen, dtype: str, scale: float | None = None) -> tuple[Risk, ...]:
    """Return what may do harm with other data; the arguments are those of `_Pair`."""
    if dtype == "float32":
        return ()
    pair = _Pair(low, reference, dtype, scale)
    return tuple(risk for find in _KINDS if (risk := find(pair)) is not None)


def _constants(pair: _Pair) -> Risk | None:
    forward = (entry for entry in pair.reference.readings if entry.direction == "forward")
    modules = _modules(entry for entry in forward if _is_constant_beyond(entry, pair.dtype))
    if not modules:
        return None
    form = FORMATS[pair.dtype]
    text = (
        f"constants in {listed_names(modules)} are outside of the range of {pair.dtype}, {form.smallest:.2g} to "
        f"{form.largest:.5g}"
    )
    return Risk("constant", modules, text)


def _losses(pair: _Pair) -> Risk | None:
    modules = _modules(entry for entry in _low_forward(pair) if family(entry.operation) == "loss")
    if not modules:
        return None
    return Risk(
        "loss", modules, f"a loss is computed in {pair.dtype} in {listed_names(modules)}: small differences are lost"
    )


def _normalizations(pair: _Pair) -> Risk | None:
    """Return the normalizations whose outputs are off; the dtype alone is no risk, as statistics are in float32."""
    exact = {key_of(entry): entry for entry in pair.reference.readings}
    readings = pair.low.readings

    def is_off(position: int) -> bool:
        # An operation may return statistics, too; the module that ends with it has what is normalized alone.
        values = (readings[position], *_module_ended(readings, position))
        return max(error_of(value, exact.get(key_of(value))) for value in values) > bound(pair.dtype, position)

    norms = {id(entry) for entry in _low_forward(pair) if family(entry.operation) == "norm"}
    places = (position for position, entry in enumerate(readings) if id(entry) in norms)
    modules = _modules(readings[position] for position in places if is_off(position))
    if not modules:
        return None
    text = (
        f"the normalization in {listed_names(modules)} differs from float32's by more than rounding explains: its "
        f"input has lost precision in {pair.dtype}"
    )
    return Risk("normalization", modules, text)


def _overflows(pair: _Pair) -> Risk | None:
    """Return the first module whose infinities do no harm."""
    if not pair.low.finite:
        return None
    exact = {key_of(entry): entry.value for entry in pair.reference.readings if not entry.operation}
    outputs = (entry for entry in pair.low.readings if entry.direction == "forward" and key_of(entry) in exact)
    broken = (entry for entry in outputs if entry.value.nonfinite > exact[key_of(entry)].nonfinite)
    entry = next(broken, None)
    if entry is None:
        return None
    text = (
        f"{entry.value.nonfinite} of {entry.value.elements} outputs of module {entry.module!r} are infinite in "
        f"{pair.dtype}, and up to {exact[key_of(entry)].largest:.4g} in float32; later modules hide it in this batch"
    )
    return Risk("overflow", (entry.module,), text)


def _gradients(pair: _Pair) -> Risk | None:
    shares = {} if pair.scale is None else flushed_gradients(pair.low, pair.reference)
    flushed = tuple(name for name, share in shares.items() if share >= FLUSHED)
    if not flushed:
        return None
    named = listed_names(flushed)
    text = f"gradients of {named} underflow to zero in {pair.dtype} at a loss scale of {pair.scale:g}: raise it"
    return Risk("gradient", flushed, text)


_KINDS: Final[tuple[Callable[[_Pair], Risk | None], ...]] = (
    _constants,
    _losses,
    _normalizations,
    _overflows,
    _gradients,
)


def _low_forward(pair: _Pair) -> list[Reading]:
    return [entry for entry in pair.low.readings if entry.direction == "forward" and entry.dtype == pair.dtype]


def _module_ended(readings: tuple[Reading, ...], position: int) -> list[Reading]:
    """Return the value of the module whose last operation this is, if it is."""
    after = readings[position + 1 : position + 2]
    return [entry for entry in after if not entry.operation and entry.module == readings[position].module]


def _is_constant_beyond(entry: Reading, dtype: str) -> bool:
    """Return whether a value in float32 has a constant that overflows in a dtype, or flushes to zero."""
    form, value = FORMATS[dtype], entry.value
    if is_mask_constant(value, form.largest):
        return True
    filled = family(entry.operation) == "mask" and value.largest == value.smallest > 0
    return filled and (value.largest > form.largest or value.smallest <= form.flushes_to)


def flushed_gradients(low: Seen, reference: Seen) -> dict[str, float]:
    """Return by parameter with some elements the share of those that are zero, and are not zero in float32."""
    shares = {}
    for name, exact in reference.replayed.gradients.items():
        gradient = low.replayed.gradients.get(name)
        nonzero = exact != 0
        if gradient is not None and gradient.shape == exact.shape and nonzero.sum() >= FEW:
            shares[name] = float((nonzero & (gradient == 0)).sum() / nonzero.sum())
    return shares


def _modules(readings: Iterable[Reading]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.module or entry.operation or "the step itself" for entry in readings))
