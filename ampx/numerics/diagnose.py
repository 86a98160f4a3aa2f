"""Find where a batch first fails, and why: precision, the data, the learning rate, or the model itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from ampx.backend import MODULE
from ampx.errors import AmpxError
from ampx.formats import FORMATS, Format
from ampx.policy import OptLevel

from .batch import FLOAT32, Batch, Seen, fitting_scale, plain
from .compare import bound, relative_error
from .operations import family, normalised
from .probe import Direction, Reading, Stats, Step, Watching

Kind = Literal[
    "healthy",
    "overflow",
    "sum",
    "epsilon",
    "mask",
    "logarithm",
    "division",
    "flush",
    "digits",
    "error",
    "loss scale",
    "data",
    "weights",
    "learning rate",
    "model",
]
# Weights that training keeps in bounds are smaller by far; inputs, too.
LARGE_WEIGHT: Final = 1e4
LARGE_INPUT: Final = 1e15
# A finite value that is off by more than this is wrong, whatever rounding explains.
WRONG: Final = 0.25
# From this share on, gradients that flush to zero are a risk.
FLUSHED: Final = 0.1
FEW: Final = 16  # elements, of which no share is worth a word
# Elements of each value that are compared with float32's.
SAMPLES: Final = 64
_SHOWN: Final = 5


@dataclass(frozen=True)
class Place:
    """A value in the run of a batch: see `ampx.Reading` for what the fields are."""

    module: str
    kind: str
    operation: str
    direction: Direction
    call: int
    dtype: str
    value: Stats
    inputs: Stats
    place: str

    @classmethod
    def of(cls, reading: Reading) -> Place:
        """Return the place of a reading."""
        return cls(**{name: getattr(reading, name) for name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        """Name the place."""
        module = f"module {self.module!r}" if self.module else "the model or the step itself"
        operation = f", operation {self.operation}" if self.operation else ""
        line = f" ({self.place})" if self.place else ""
        return f"{self.direction} pass, {module}{operation}{line}"


@dataclass(frozen=True)
class Risk:
    """What does no harm in this batch and may do some in another, or costs speed.

    Attributes:
        kind: `"shape"`, `"constant"`, `"loss"`, `"normalization"` or `"gradient"`.
        where: Names of modules or parameters.
        text: One sentence.
    """

    kind: Literal["shape", "constant", "loss", "normalization", "gradient"]
    where: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """Where a batch first fails, and why.

    Attributes:
        kind: What it is: `"healthy"` for nothing. Precision is at fault for `"overflow"` (a value beyond the dtype's
            largest number), `"sum"` (one that only the sum is), `"epsilon"` (a divisor that is zero in this dtype),
            `"mask"` (a constant such as -1e9), `"error"` (the framework refuses to compute it in this dtype), and for
            `"logarithm"` and `"division"` (of or by zero) unless `float32_fails`; also for `"flush"` (values are zero
            that are not zero in float32) and `"digits"` (too few of them are left), where the loss stays finite and is
            wrong. It is not for `"loss scale"` (the scale will back off), `"data"`, `"weights"` (they are not finite),
            `"learning rate"` (they grew) and `"model"`.
        dtype: What was computed in.
        scale: The loss scale.
        loss: The loss.
        reference_loss: The loss in float32.
        float32_fails: Float32 fails on this batch, too.
        last_finite: The last place before that at which all is finite; None where it is the batch itself.
        first_nonfinite: The first place that is not finite; of an `"error"` the place that raises, in float32.
        why: One sentence.
        advice: What to do, as code; empty where nothing is to be done.
        risks: What may do harm elsewhere.
    """

    kind: Kind
    dtype: str
    scale: float
    loss: float
    reference_loss: float
    float32_fails: bool
    last_finite: Place | None
    first_nonfinite: Place | None
    why: str
    advice: str
    risks: tuple[Risk, ...] = ()

    @property
    def precision_is_innocent(self) -> bool:
        """Whether the batch fails whatever the precision, or does not fail at all."""
        return self.float32_fails or self.kind in ("healthy", "loss scale", "data", "weights", "learning rate", "model")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; numbers that are not finite are strings."""
        result: dict[str, Any] = plain(self)
        return {**result, "precision_is_innocent": self.precision_is_innocent}

    def __str__(self) -> str:
        """Return the bracket, why, and what to do, as text."""
        lines = [f"{self.kind}: {self.why}"]
        place = self.first_nonfinite
        if place is not None and self.kind == "error":
            lines.append(f"  raises: {place}; in float32 from values {_range(place.inputs)}")
        elif place is not None:
            if self.last_finite is not None:
                lines.append(f"  last finite:      {self.last_finite}: {_range(self.last_finite.value)}")
            lines.append(f"  first non-finite: {place}: {_range(place.value)}, from {_range(place.inputs)}")
        if self.advice:
            lines += ["", *(f"    {line}" for line in self.advice.splitlines())]
        return "\n".join([*lines, *(f"  risk: {risk.text}" for risk in self.risks)])


def _range(stats: Stats) -> str:
    if not stats.elements:
        return "nothing"
    bad = f"{stats.nonfinite} of {stats.elements} not finite ({stats.nan} NaN), the others " if stats.nonfinite else ""
    return f"{bad}of magnitude {stats.smallest:.3g} to {stats.largest:.3g}, lowest {stats.lowest:.3g}"


# -- the first place -------------------------------------------------------------------------------


Key = tuple[str, str, str, int]


def _key(reading: Reading) -> Key:
    return reading.module, reading.operation, reading.direction, reading.call


def first_failing(readings: Sequence[Reading], healthy: Mapping[Key, Reading] | None) -> int | None:
    """Return the position of the first value that is not finite, and should be; None where there is none.

    Args:
        readings: Of the run that fails.
        healthy: Of a run that does not: what is not finite there, either, such as a mask of -inf, is meant to be so.
            None where every run fails.
    """
    candidates = [position for position, entry in enumerate(readings) if entry.value.nonfinite]
    if healthy is not None:
        candidates = [
            position
            for position in candidates
            if (key := _key(readings[position])) not in healthy
            or healthy[key].value.nonfinite < readings[position].value.nonfinite
        ]
    elif harmful := [position for position in candidates if not _is_meant(readings, position)]:
        candidates = harmful
    return candidates[0] if candidates else None


def _is_meant(readings: Sequence[Reading], position: int) -> bool:
    """Return whether an infinity is no failure: a mask's, or one that an operation makes finite numbers of."""
    if readings[position].value.nan or readings[position].direction == "backward":
        return False
    if family(readings[position].operation) == "mask":
        return True
    for entry in readings[position + 1 :]:
        if entry.direction == "backward" or entry.value.nan:
            return False
        if entry.inputs.nonfinite and not entry.value.nonfinite:
            return True
    return False


def _before(readings: Sequence[Reading], position: int) -> Place | None:
    """Return the last finite value before a position that is no cast."""
    for entry in reversed(readings[:position]):
        if not entry.value.nonfinite and entry.value.elements and family(entry.operation) != "cast":
            return Place.of(entry)
    return None


# -- why -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A failing place, and what is known of it."""

    place: Reading
    reference: Reading | None  # the same place in float32, where that is finite
    dtype: str
    readings: Sequence[Reading]
    scale: float = 1.0
    float32_fails: bool = False
    healthy: Mapping[Key, Reading] | None = None  # float32's values by place, where they are finite

    @property
    def exact(self) -> tuple[Stats, ...]:
        """What is known of the true values in the forward pass; a cast that only low precision has shows its inputs."""
        if self.place.direction == "backward":
            return ()
        if self.reference is not None:
            return self.reference.value, self.reference.inputs
        return (self.place.inputs,) if family(self.place.operation) == "cast" and not self.float32_fails else ()

    @property
    def form(self) -> Format:
        return FORMATS[self.dtype]

    @property
    def exact_size(self) -> str:
        """How large the value is in float32, or what it was computed from."""
        reference, inputs = self.reference, self.place.inputs
        return f"{reference.value.largest:.4g} in float32" if reference else f"up to {inputs.largest:.4g} before"

    @property
    def new_zeros(self) -> bool:
        """Whether inputs are zero that are not zero in float32; where nothing is known of float32, any."""
        if self.place.value.nan and normalised(self.place.operation) in _QUOTIENTS:
            return True  # 0/0, however many zeros there were
        if self.reference is None:
            return self.place.inputs.zeros > 0
        return self.place.inputs.zeros > self.reference.inputs.zeros

    @property
    def cancelled(self) -> Reading | None:
        """The difference that became zero or negative: the dtype holds what it is in float32, and not its terms."""
        for entry in self.readings:
            exact = (self.healthy or {}).get(_key(entry))
            if entry is self.place or exact is None or entry.module != self.place.module:
                continue
            negative = entry.value.lowest < 0 <= exact.value.lowest
            if entry.direction == "forward" and (negative or entry.value.zeros > exact.value.zeros):  # the first
                held = exact.value.smallest >= self.form.smallest
                return entry if held and normalised(entry.operation) in _DIFFERENCES else None
        return None

    @property
    def beyond(self) -> bool:
        """Whether float32's value does not fit into the dtype."""
        if self.reference is None:
            return any(stats.largest > self.form.largest for stats in self.exact)
        scale = self.scale if self.place.direction == "backward" else 1.0
        return bool(self.reference.value.overflowed) or self.reference.value.largest * scale > self.form.largest


def _mask_constant(stats: Stats, largest: float) -> bool:
    """Return whether the lowest value is a constant of the script: -1e9, or the lowest number of a dtype."""
    low = -stats.lowest
    if low <= largest or stats.largest > low:
        return False
    digits = math.log10(low)
    powers = abs(digits - round(digits)) < 1e-3
    return powers or any(abs(low / form.largest - 1) < 1e-3 for form in FORMATS.values())


Cause: TypeAlias = tuple[Kind, str]


def _cause(case: _Case) -> Cause:
    """Return the kind and a sentence, of a place whose inputs are finite: the first cause that fits."""
    causes = (find(case) for find in (_mask, _derivative_at_zero, _division, _logarithm, _sum, _overflow))
    return next(filter(None, causes), ("model", "it is not finite in float32, either, with finite inputs and weights"))


def _mask(case: _Case) -> Cause | None:
    stats = next((stats for stats in case.exact if _mask_constant(stats, case.form.largest)), None)
    if stats is None:
        return None
    bound = f"{case.dtype}'s lowest number, {-case.form.largest:.5g}"
    return "mask", f"the constant {stats.lowest:.3g} is beyond {bound}: it is -inf"


def _derivative_at_zero(case: _Case) -> Cause | None:
    forward = _forward_at_zero(case) if case.place.direction == "backward" else None
    if forward is None:
        return None
    return "logarithm", (
        f"the derivative of {forward.operation} at zero is infinite, and {forward.inputs.zeros} of its inputs are zero"
    )


def _division(case: _Case) -> Cause | None:
    dtype, reference = case.dtype, case.reference
    if family(case.place.operation) != "division" or not case.new_zeros:
        return None
    if reference is None:
        return "division", "it divides by zero"
    if case.cancelled is not None:
        return "digits", f"the divisor is zero in {dtype}: {_of_difference(case.cancelled, dtype)}"
    return "epsilon", (
        f"the divisor is zero in {dtype}, whose smallest number is {case.form.smallest:.2g}; in float32 it is not, for "
        f"there the smallest input is {reference.inputs.smallest:.2g}"
    )


def _logarithm(case: _Case) -> Cause | None:
    place, dtype, reference = case.place, case.dtype, case.reference
    does = family(place.operation)
    if does in ("logarithm", "root") and place.inputs.lowest < 0 and place.value.nan:
        if reference is not None and reference.inputs.lowest >= 0 and case.cancelled is not None:
            what = f"it takes a logarithm or root of {place.inputs.lowest:.3g}, which float32 does not have"
            return "digits", f"{what}: {_of_difference(case.cancelled, dtype)}"
        return "logarithm", f"it takes a logarithm or root of {place.inputs.lowest:.3g}, which is negative"
    if does != "logarithm" or not case.new_zeros:
        return None
    flushed = f"; in float32 it is {reference.inputs.smallest:.2g}, which {dtype} flushes" if reference else ""
    if case.cancelled is not None:
        flushed = f": {_of_difference(case.cancelled, dtype)}"
    return "logarithm", f"it takes the logarithm of zero{flushed}"


def _sum(case: _Case) -> Cause | None:
    inputs, form = case.place.inputs, case.form
    if family(case.place.operation) != "sum" or case.reference is None:
        return None
    if inputs.largest > form.largest or inputs.elements <= 2:
        return None
    does_so = "multiplies" if "prod" in normalised(case.place.operation) else "sums"
    return "sum", (
        f"it {does_so} {inputs.elements} elements of up to {inputs.largest:.4g} in {case.dtype}, whose largest number "
        f"is {form.largest:.5g}; the result is {case.exact_size}"
    )


def _overflow(case: _Case) -> Cause | None:
    largest = f"{case.dtype}'s largest number, {case.form.largest:.5g}"
    if case.beyond:
        scaled = case.place.direction == "backward" and case.scale != 1
        times = f" times the loss scale of {case.scale:g}" if scaled else ""
        return "overflow", f"the value, {case.exact_size}{times}, is beyond {largest}"
    if case.float32_fails:
        return None
    return "overflow", (
        f"it is not finite in {case.dtype}, whose largest number is {case.form.largest:.5g}, and is {case.exact_size}: "
        f"a part of it is beyond the dtype"
    )


def _forward_at_zero(case: _Case) -> Reading | None:
    """Return the root or logarithm of zero, in the forward pass, that a failing backward belongs to."""
    for entry in case.readings:
        if entry.direction == "forward" and entry.module == case.place.module and entry.inputs.zeros:
            same_line = not (entry.place and case.place.place) or entry.place == case.place.place
            power = {normalised(entry.operation), normalised(case.place.operation)} <= _POWERS
            if same_line and (power or family(entry.operation) in ("root", "logarithm")):
                return entry
    return None


def _of_difference(entry: Reading, dtype: str) -> str:
    """Return what became of a difference."""
    where = f" ({entry.place})" if entry.place else ""
    return (
        f"operation {entry.operation}{where} subtracts numbers of up to {entry.inputs.largest:.4g} that differ by less "
        f"than {FORMATS[dtype].bits} bits of significand keep apart"
    )


_EPSILON: Final = 1e-6  # less is no help: what is divided by it overflows soon
# A difference, whatever its sign was; and powers, whose derivative at zero is infinite where the exponent is below 1.
_DIFFERENCES: Final = frozenset({"sub", "subtract", "rsub", "minus", "add", "addv", "plus", "addn"})
# Of finite numbers NaN for 0/0 only.
_QUOTIENTS: Final = frozenset({"div", "divide", "truedivide", "realdiv", "rdiv"})
_POWERS: Final = frozenset({"pow", "power", "rpower", "powx"})
_SMALLER: Final = "x = x - x.max()  # before exp, as softmax and logsumexp do; softplus(x) for log(1 + exp(x))\n# or:\n"
_DENY: Final = (
    "amp = ampx.init(dtype={dtype!r}, deny=[{entry!r}])  # keep it in float32\n"
    "model = amp.prepare(model)  # {which}, before wrap_optimizer"
)


def _advice(kind: Kind, place: Reading | None, dtype: str, float32_fails: bool = False) -> str:
    """Return what to do, as code; float32 is no way out where it fails, too."""
    form = FORMATS[dtype]
    # Of a second model a name begins with its class and a colon, which `prepare` of that model does not know.
    kind_of_model, colon, name = (place.module if place is not None else "").rpartition(":")
    entry = f"{MODULE}{name}" if name else ""
    deny = (
        _DENY.format(dtype=dtype, entry=entry, which=f"the {kind_of_model}" if colon else "which has that module")
        if entry
        else "with ampx.autocast(enabled=False):  # around the lines that compute this, from inputs in float32\n    ..."
    )
    wide = (
        '\n# or use a dtype with the range of float32:\namp = ampx.init(dtype="bfloat16")' if dtype == "float16" else ""
    )
    return {
        "healthy": "",
        "loss scale": "",
        "overflow": (_SMALLER if place is not None and normalised(place.operation) == "exp" else "") + deny + wide,
        "sum": deny + wide,
        "epsilon": f"eps = {max(2 * form.smallest_normal, _EPSILON):.1g}  # {dtype} holds it\n# or:\n{deny}",
        "mask": f"mask_value = {-form.largest / 2:.4g}  # {dtype} holds it, and exp of it is 0",
        "logarithm": f"x = x.clip({max(form.smallest_normal, _EPSILON):.1g})"
        "  # before the logarithm or root; or use log_softmax" + ("" if float32_fails else f"\n# or:\n{deny}"),
        "flush": deny + wide,
        "digits": deny,
        "error": deny if entry else "with ampx.autocast(enabled=False):  # around the line that raises\n    ...",
        "division": f"x = y / (z + {max(2 * form.smallest_normal, _EPSILON):.1g})",
        "data": "assert numpy.isfinite(batch).all()  # in the data pipeline: drop or mend the sample",
        "weights": "# load the last checkpoint with finite weights; skip steps whose gradients are not finite:\n"
        "opt = ampx.wrap_optimizer(opt, max_grad_norm=1.0)",
        "learning rate": "opt = ampx.wrap_optimizer(opt, max_grad_norm=1.0)  # and a smaller learning rate",
        "model": "# look at the operation above: float32 does not help",
    }[kind]


# -- diagnosis -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What a framework raised in low precision.

    Attributes:
        message: Type and message, in one line.
        seen: What was read before it raised.
        line: The line of the user's own code that it came from; "" for unknown.
    """

    message: str
    seen: Sequence[Reading] = ()
    line: str = ""


def examined(
    low: Seen | Refusal, reference: Seen, dtype: str, scale: float, again: Callable[[float], Seen]
) -> Diagnosis:
    """Say where a batch first fails, and why.

    Args:
        low: The batch in the precision that fails; the reference itself where nothing was cast.
        reference: The batch in float32, from the same weights and random numbers, watched alike.
        dtype: The precision, of `FORMATS`.
        scale: The loss scale of `low`.
        again: Runs the batch in that precision with another loss scale.
    """
    if isinstance(low, Refusal):
        return refused(low.message, reference, dtype, scale, low.seen, low.line)
    overflows = low is not reference and math.isfinite(low.replayed.loss) and low.overflows
    return diagnosed(low, reference, dtype, scale, again(1.0) if overflows and scale != 1 else None)


def diagnosed(low: Seen, reference: Seen, dtype: str, scale: float = 1.0, unscaled: Seen | None = None) -> Diagnosis:
    """Say where a batch first fails, and why.

    Args:
        low: The batch in the precision that fails, watched, with operations where the backend sees them.
        reference: The same batch in float32, from the same weights and random numbers, watched alike.
        dtype: The precision, of `FORMATS`.
        scale: The loss scale of `low`.
        unscaled: The batch in that precision with a loss scale of 1, where that was replayed.
    """
    float32_fails = not reference.finite

    def result(kind: Kind, why: str, position: int | None = None, seen: Seen = low) -> Diagnosis:
        place = None if position is None else seen.readings[position]
        return Diagnosis(
            kind,
            dtype,
            scale,
            low.replayed.loss,
            reference.replayed.loss,
            float32_fails,
            None if position is None else _before(seen.readings, position),
            None if place is None else Place.of(place),
            f"{why}.",
            _advice(kind, place, dtype, float32_fails),
            risks(low, reference, dtype, scale if kind == "healthy" else None),
        )

    if low.finite:
        return _of_finite(low, reference, dtype, result)
    if float32_fails:
        return _of_float32(reference, result)
    if math.isfinite(low.replayed.loss) and unscaled is not None and unscaled.finite:
        position = first_failing(low.readings, {_key(entry): entry for entry in reference.readings})
        return result(
            "loss scale",
            f"the gradients overflow only times the loss scale of {scale:g}: the step is skipped and the scale backs "
            f"off, as it should",
            position,
        )
    exact = {_key(entry): entry for entry in reference.readings}
    position = first_failing(low.readings, exact)
    if position is None:
        return result("overflow", f"the loss or a gradient is not finite in {dtype}, and every value that was seen is")
    place = low.readings[position]
    # Casts are numbered otherwise in float32, where there are fewer: they are judged by what they are given.
    judged_alone = family(place.operation) == "cast" and bool(place.inputs.elements) and not place.inputs.nonfinite
    case = _Case(place, None if judged_alone else exact.get(_key(place)), dtype, low.readings, scale, healthy=exact)
    kind, why = _cause(case)
    return result(kind, f"in the {Place.of(place)}, {why}", position)


def _of_finite(low: Seen, reference: Seen, dtype: str, result: Callable[..., Diagnosis]) -> Diagnosis:
    """Say what is wrong with a batch whose loss and gradients are finite: an infinity that became zero, or nothing."""
    exact = {_key(entry): entry for entry in reference.readings}
    position = None if dtype == "float32" else first_wrong(low.readings, exact, dtype)
    if position is None:
        return result("healthy", f"the loss and all gradients are finite in {dtype}")
    place = low.readings[position]
    other = exact.get(_key(place))
    where, still = f"in the {Place.of(place)}", "; the loss stays finite, and is wrong"
    if place.value.nonfinite:
        kind, why = _cause(_Case(place, other, dtype, low.readings, healthy=exact))
        return result(kind, f"{where}, {why}{still}", position)
    before = place.inputs if other is None else other.value
    if _flushes(place.value, before):
        return result(
            "flush",
            f"{where}, {place.value.zeros} of {place.value.elements} elements are zero in {dtype}, whose smallest "
            f"number is {FORMATS[dtype].smallest:.2g}; in float32 they are up to {before.largest:.4g}{still}",
            position,
        )
    error = relative_error(place.sample, other.sample) if other is not None else math.nan
    return result(
        "digits",
        f"{where}, the value is off by {error:.2g} of its norm: {FORMATS[dtype].bits} bits of significand are too "
        f"few for the numbers that it is the difference or the sum of{still}",
        position,
    )


def _flushes(value: Stats, exact: Stats) -> bool:
    """Return whether most of what is not zero in float32 is zero."""
    nonzero = exact.elements - exact.zeros
    return value.elements == exact.elements and 2 * (value.zeros - exact.zeros) > nonzero > 0


def first_wrong(readings: Sequence[Reading], exact: Mapping[Key, Reading], dtype: str) -> int | None:
    """Return the position of the first value that spoils a finite result; None where no module's output is wrong.

    An infinity that does no harm, such as that of a mask, makes no output wrong.

    Args:
        readings: In low precision, with samples.
        exact: In float32, with samples.
        dtype: The low precision.
    """
    wrong = None
    for position, entry in enumerate(readings):
        other = exact.get(_key(entry))
        if entry.direction == "forward" and not entry.operation and _is_wrong(entry, other, dtype, position):
            wrong = position
            break
    if wrong is None:
        return None
    for position, entry in enumerate(readings[:wrong]):
        if entry.direction != "forward":
            continue
        other = exact.get(_key(entry))
        before = entry.inputs if other is None else other.value
        if entry.value.nonfinite > before.nonfinite or _flushes(entry.value, before):
            return position
    return next(
        position
        for position, entry in enumerate(readings)
        if entry.direction == "forward" and _is_wrong(entry, exact.get(_key(entry)), dtype, position)
    )


def _is_wrong(entry: Reading, other: Reading | None, dtype: str, position: int) -> bool:
    """Return whether a finite value is off by more than rounding could explain."""
    error = _error(entry, other)
    return math.isfinite(error) and error > max(WRONG, bound(dtype, position))


def _module_ended(readings: Sequence[Reading], position: int) -> Sequence[Reading]:
    """Return the value of the module whose last operation this is, if it is."""
    after = readings[position + 1 : position + 2]
    return [entry for entry in after if not entry.operation and entry.module == readings[position].module]


def _error(entry: Reading, other: Reading | None) -> float:
    """Return the relative error of a value; 0 where there is nothing to compare it with."""
    if other is None or entry.sample is None or other.sample is None or entry.sample.shape != other.sample.shape:
        return 0.0
    return relative_error(entry.sample, other.sample)


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of what was raised."""
    return f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0]}"


def where_raised(seen: Sequence[Reading], reference: Sequence[Reading]) -> Reading | None:
    """Return the first value of the run in float32 that the run that raised did not come to; None where nothing tells.

    Casts are left out: which there are depends on the dtype.
    """
    reached = {_key(entry) for entry in seen}
    missing = (entry for entry in reference if _key(entry) not in reached and family(entry.operation) != "cast")
    return next(missing, None)


def refused(
    message: str, reference: Seen, dtype: str, scale: float, seen: Sequence[Reading] = (), line: str = ""
) -> Diagnosis:
    """Say why a framework raises in low precision what it does not raise in float32: for a constant, as a rule.

    Args:
        message: What the framework raised, in one line.
        reference: The batch in float32.
        dtype: The low precision.
        scale: The loss scale.
        seen: What was read before it raised.
        line: The line of the user's own code that it came from; "" for unknown.
    """
    form, loss = FORMATS[dtype], reference.replayed.loss
    readings = reference.readings
    reached = {_key(entry) for entry in seen}
    constants = (
        position
        for position, entry in enumerate(readings)
        if entry.direction == "forward" and _mask_constant(entry.value, form.largest) and _key(entry) not in reached
    )
    position = next(constants, None)
    kind: Kind
    place: Reading | None
    if position is None:
        kind, place = "error", where_raised(seen, readings)
        before = Place.of(seen[-1]) if seen else None
        at = "" if place is None else f"in the {Place.of(place)}, "
        if line and (place is None or not place.place):
            at += f"in {line}, "
        why = f"{at}it cannot be computed in {dtype}, only in float32"
    else:
        kind, place, before = "mask", readings[position], _before(readings, position)
        why = (
            f"in the {Place.of(place)}, the constant {place.value.lowest:.3g} is beyond {dtype}'s lowest number, "
            f"{-form.largest:.5g}"
        )
    return Diagnosis(
        kind,
        dtype,
        scale,
        math.nan,
        loss,
        not math.isfinite(loss),
        before,
        None if place is None else Place.of(place),
        f"{why}: {message}.",
        _advice(kind, place, dtype),
    )


def _of_float32(reference: Seen, result: Callable[..., Diagnosis]) -> Diagnosis:
    """Say why a batch fails in float32: precision is innocent."""
    parameters = reference.replayed.parameters
    broken = [name for name, stats in parameters.items() if stats.nonfinite]
    position = first_failing(reference.readings, None)
    place = None if position is None else reference.readings[position]
    if broken:
        return result(
            "weights",
            f"the weights are not finite already ({_listed(broken)}): a former step wrote inf or NaN to them",
            position,
            reference,
        )
    entering = next((entry for entry in reference.readings if entry.inputs.elements), None)
    if place is not None and place.inputs.nonfinite and place.direction == "forward":
        return result(
            "data",
            f"{place.inputs.nonfinite} of {place.inputs.elements} inputs of the {Place.of(place)} are not finite, and "
            f"nothing before it computed them: they came with the batch",
            position,
            reference,
        )
    grown = {name: stats.largest for name, stats in parameters.items() if stats.largest > LARGE_WEIGHT}
    if grown:
        largest = max(grown, key=lambda name: grown[name])
        return result(
            "learning rate",
            f"weights have grown to {grown[largest]:.3g} ({_listed([largest])}): float32 overflows, too, so that "
            f"no precision helps",
            position,
            reference,
        )
    if entering is not None and entering.inputs.largest > LARGE_INPUT:
        return result(
            "data",
            f"the inputs of the {Place.of(entering)} are as large as {entering.inputs.largest:.3g}, beyond what "
            f"float32 can square",
            position,
            reference,
        )
    if place is None:
        return result("model", "the loss or a gradient is not finite in float32, either")
    kind, why = _cause(_Case(place, None, "float32", reference.readings, float32_fails=True))
    return result(kind, f"in the {Place.of(place)}, {why}; float32 fails, too", position, reference)


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


# -- risks -----------------------------------------------------------------------------------------


def risks(low: Seen, reference: Seen, dtype: str, scale: float | None = None) -> tuple[Risk, ...]:
    """Return what may do harm with other data, or costs speed, as far as one batch shows it.

    Args:
        low: The batch in low precision.
        reference: The batch in float32.
        dtype: The low precision.
        scale: The loss scale, of a batch whose gradients are those of its values; None for another.
    """
    if dtype == "float32":
        return ()
    result: list[Risk] = []
    multiple = 16 if FORMATS[dtype].bits < 8 else 8
    shapes = reference.shapes
    if shapes is None:
        shapes = {name: gradient.shape for name, gradient in reference.replayed.gradients.items()}
    odd = {
        name: "x".join(map(str, shape))
        for name, shape in shapes.items()
        if len(shape) >= 2 and any(size % multiple for size in sorted(shape)[-2:])
    }
    if odd:
        named = _listed([f"{name} ({shape})" for name, shape in odd.items()])
        text = f"dimensions of {named} are no multiples of {multiple}: matrix units of accelerators pad them"
        result.append(Risk("shape", tuple(odd), text))
    constants = _modules(
        entry for entry in reference.readings if entry.direction == "forward" and _is_constant_beyond(entry, dtype)
    )
    if constants:
        form = FORMATS[dtype]
        text = (
            f"constants in {_listed(constants)} are beyond what {dtype} can hold: ±{form.largest:.5g}, and nothing "
            f"between 0 and {form.smallest:.2g}"
        )
        result.append(Risk("constant", constants, text))
    low_forward = [
        (position, entry)
        for position, entry in enumerate(low.readings)
        if entry.direction == "forward" and entry.dtype == dtype
    ]
    losses = _modules(entry for _, entry in low_forward if family(entry.operation) == "loss")
    if losses:
        text = f"a loss is computed in {dtype} in {_listed(losses)}: small differences are lost"
        result.append(Risk("loss", losses, text))
    # Frameworks take the statistics in float32 where the values are low: only what came out tells whether that helped.
    exact = {_key(entry): entry for entry in reference.readings}
    norms = _modules(
        entry
        for position, entry in low_forward
        if family(entry.operation) == "norm"
        # An operation may return statistics, too; the module that ends with it has what is normalized alone.
        and max(_error(value, exact.get(_key(value))) for value in (entry, *_module_ended(low.readings, position)))
        > bound(dtype, position)
    )
    if norms:
        text = (
            f"a normalization in {dtype} in {_listed(norms)} is off by more than rounding explains: what it enlarges "
            f"are differences that {dtype} has lost"
        )
        result.append(Risk("normalization", norms, text))
    shares = {} if scale is None else flushed_gradients(low, reference)
    flushed = [name for name, share in shares.items() if share >= FLUSHED]
    if flushed:
        text = f"gradients of {_listed(flushed)} flush to zero in {dtype} at a loss scale of {scale:g}: raise it"
        result.append(Risk("gradient", tuple(flushed), text))
    return tuple(result)


def _is_constant_beyond(entry: Reading, dtype: str) -> bool:
    """Return whether a value in float32 has a constant that overflows in a dtype, or flushes to zero."""
    form, value = FORMATS[dtype], entry.value
    if _mask_constant(value, form.largest):
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


def diagnose(
    step: Step,
    model: Any,
    *,
    dtype: object = None,
    framework: str | None = None,
    device: str | None = None,
    level: OptLevel = "O1",
    allow: Iterable[Any] = (),
    deny: Iterable[Any] = (),
    loss_scale: float | None = None,
) -> Diagnosis:
    """Compute one batch in low precision and in float32, and say where it first fails, and why.

    Nothing is stepped: weights, buffers, gradients and random state stay as they are. Call it after the fact, with the
    batch whose loss was NaN.

    Args:
        step: A function that takes the model and returns the loss of one batch, without a backward.
        model: The model; its parameters where these are a value (JAX).
        dtype: The precision that fails; by default the session's, or what the device prefers.
        framework: Name of the framework; by default that of the only session, or the only one imported.
        device: Name of the device; by default the session's, or the best.
        level: `"O1"`, or `"O0"` for float32.
        allow: As in `init`; `"module:pattern"` names modules.
        deny: As in `init`; `"module:pattern"` names modules.
        loss_scale: What the loss was multiplied by; by default the largest, up to 65536, whose gradients the dtype can
            hold, and 1 for dtypes with the exponents of float32.

    Returns:
        The diagnosis; print it for the place, why, and what to do. Its `kind` is `"healthy"` where the batch does not
        fail.

    Raises:
        UnsupportedDtypeError: The device neither computes nor simulates the dtype.
        UnsupportedByBackendError: The backend does not watch or does not replay.

    Sync: many.
    """
    batch = Batch(step, model, framework, device)
    chosen = batch.dtype(dtype)
    casting = batch.casting(chosen, level, allow, deny)
    # Where a dtype is simulated, operations may be those of the rounding, too.
    operations = not casting.simulated or batch.probe.rounds_unseen
    watching = Watching(dtype=chosen, operations=operations, samples=SAMPLES)
    reference = batch.run(watching=watching)
    scale = fitting_scale(casting.dtype, reference) if loss_scale is None else loss_scale
    low: Seen | Refusal = reference
    if casting is not FLOAT32:
        try:
            low = batch.run(casting, scale, watching)
        except AmpxError:
            raise
        except Exception as error:  # of the framework, which does not refuse float32
            low = Refusal(in_one_line(error), batch.read_before_error)
    return examined(low, reference, chosen, scale, lambda scale: batch.run(casting, scale))
