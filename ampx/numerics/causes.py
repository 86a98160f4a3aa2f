"""Why a batch fails: rules about the first failing place. What they suspect is tried before anything is advised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from ampx.formats import FORMATS, Format

from .batch import Refusal, Seen
from .compare import Key, by_key, carries_scale, error_of, key_of, listed_names, unscaled
from .operations import family, normalised, poles_of, reaches
from .places import (
    WRONG,
    Place,
    first_failing,
    first_wrong,
    flushes,
    is_low,
    is_mask_constant,
    is_origin,
    masked_whole,
    outermost,
    overflow_by_hand,
    wrong_values,
)
from .probe import Reading, Stats
from .risks import flushed_gradients
from .tolerance import percent

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
# Weights that training keeps in bounds are smaller by far.
LARGE_WEIGHT: Final = 1e4
# The square of more overflows.
LARGE_INPUT: Final = math.sqrt(FORMATS["float32"].largest)
# Of a gradient that flushes so large a share nothing is trained.
MOST: Final = 0.5
# An operation that reads a variable, as `normalised` has it.
_READ: Final = "readvariable"
# A difference, whatever its sign was; and powers, whose derivative at zero is infinite where the exponent is below 1.
_DIFFERENCES: Final = frozenset({"sub", "subtract", "rsub", "minus", "rminus", "add", "addv", "plus", "addn"})
# What bounds numbers from below.
_BOUNDS: Final = frozenset({"clamp", "clampmin", "clip", "clipbyvalue", "maximum", "max"})
# Of finite numbers NaN for 0/0 only.
_QUOTIENTS: Final = frozenset({"div", "divide", "truedivide", "realdiv", "rdiv"})
_PRODUCTS: Final = frozenset({"mul", "multiply", "times"})
_POWERS: Final = frozenset({"pow", "power", "rpower", "powx"})

Cause: TypeAlias = tuple[Kind, str]


@dataclass(frozen=True)
class Fault:
    """What is suspected to be wrong with a batch.

    Attributes:
        kind: What it is.
        why: A sentence: what failed, and why; without a capital letter and a full stop.
        readings: Of the run that shows it.
        position: Of the failing place in these; None where no value tells.
        stays_finite: The loss is finite, and a value of the forward pass is wrong.
        cancels: At the place digits are missing, of a difference or of what it received: a module before it may have
            rounded them away. What the dtype flushes is lost at the place, whichever module computed it.
        by_hand: The script itself casts there: float32 computes it in low precision, too, and no module of it can be
            kept in float32.
        function: The operation of the forward pass whose derivative is not finite at the place; "" for none.
    """

    kind: Kind
    why: str
    readings: Sequence[Reading] = ()
    position: int | None = None
    stays_finite: bool = False
    cancels: bool = False
    by_hand: bool = False
    function: str = ""

    @property
    def place(self) -> Reading | None:
        """The failing place."""
        return None if self.position is None else self.readings[self.position]


@dataclass(frozen=True)
class Growth:
    """How far a training in float32 has grown: it diverges, whatever the precision.

    Attributes:
        since: The earlier step.
        factor: How many times larger the outputs of a module are since, of a batch of the same size.
        module: Its name.
        before: The loss in float32 then.
        loss: The loss in float32 now.
        untrained: The loss of the same batch with the weights of the first step, which is finite; None for unknown.
        rates: The learning rate then and now; None where it is not known, or has not grown.
    """

    since: int
    factor: float
    module: str
    before: float
    loss: float
    untrained: float | None = None
    rates: tuple[float, float] | None = None

    def __str__(self) -> str:
        """Return it as a sentence, without its full stop."""
        module = f"module {self.module!r}" if self.module else "the model"
        weights = (
            "and its weights may have grown"
            if self.untrained is None
            else f"so its weights have grown: with those of the first step the loss is {self.untrained:.3g}"
        )
        rates = "" if self.rates is None else f", and the learning rate from {self.rates[0]:.3g} to {self.rates[1]:.3g}"
        return (
            f"training diverges, in float32, too: since step {self.since} the loss has grown there from "
            f"{self.before:.3g} to {self.loss:.3g}, and the output of {module} by a factor of {self.factor:.2g} for a "
            f"batch of the same size{rates}, {weights}"
        )


# -- a place that fails ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
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
        """What the dtype can hold."""
        return FORMATS[self.dtype]

    @property
    def exact_size(self) -> str:
        """How large the value is in float32, or what it was computed from."""
        reference, inputs = self.reference, self.place.inputs
        if reference is None and not inputs.elements:
            return "casts larger numbers"
        if reference is None:
            return f"is computed from numbers of up to {inputs.largest:.4g}"
        return f"is {reference.value.largest:.4g} in float32"

    @property
    def divides_by_zero(self) -> bool:
        """Whether a divisor is zero: a zero that is divided by anything else is zero."""
        value, inputs = self.place.value, self.place.inputs
        if value.nan and not inputs.nonfinite and normalised(self.place.operation) in _QUOTIENTS:
            return True  # 0/0
        has_both = inputs.elements > value.elements + 1
        only_zero_overflows = has_both and inputs.largest <= self.form.largest * inputs.smallest
        return inputs.zeros > (0 if only_zero_overflows else value.zeros)

    @property
    def new_zeros(self) -> bool:
        """Whether inputs are zero that are not zero in float32; where nothing is known of float32, any."""
        if self.reference is None:
            return self.place.inputs.zeros > 0
        return self.place.inputs.zeros > self.reference.inputs.zeros

    @property
    def holds_inputs(self) -> bool:
        """Whether no input is too small for the dtype: what is zero here has lost its digits."""
        return self.reference is not None and self.reference.inputs.smallest > self.form.flushes_to

    @property
    def was_flushed(self) -> bool:
        """Whether most inputs of an operation in float32 are zero, which the dtype has flushed before."""
        if self.reference is None or is_low(self.place):
            return False
        return flushes(self.place.inputs, self.reference.inputs) and not self.holds_inputs

    @property
    def cancelled(self) -> Reading | None:
        """The difference that became zero or negative: the dtype holds what it is in float32, and not its terms."""
        lost = ((entry, exact) for entry, exact in self._own_pairs() if _loses(entry.value, exact.value))
        entry, exact = next(lost, (self.place, self.place))
        is_difference = normalised(entry.operation) in _DIFFERENCES and entry is not self.place
        return entry if is_difference and exact.value.smallest >= self.form.smallest else None

    @property
    def flushed(self) -> tuple[Reading, Reading] | None:
        """What the first operation before the place returns that the dtype flushes, and what that is in float32."""
        lost = ((entry, exact) for entry, exact in self._own_pairs() if entry.value.zeros > exact.value.zeros)
        return next(
            (pair for pair in lost if pair[0].operation and pair[1].value.smallest <= self.form.flushes_to), None
        )

    def lost_constant(self, pole: float = 0.0) -> str:
        """Say which constant, in whatever module, rounds to the pole it was to keep values away from; "" for none."""
        said = (self._bound_at(*pair, pole) if pole else self._constant_at_zero(*pair) for pair in self._pairs())
        return next(filter(None, said), "")

    def _bound_at(self, entry: Reading, exact: Reading, pole: float) -> str:
        passes = normalised(entry.operation) in _BOUNDS and reaches(entry.value, pole, exact.value)
        return f", because {Place.of(entry).source} does not keep them from {pole:g} in {self.dtype}" if passes else ""

    def _constant_at_zero(self, entry: Reading, exact: Reading) -> str:
        bounds, source = normalised(entry.operation) in _BOUNDS, Place.of(entry).source
        has_lost = entry.value.zeros > exact.value.zeros
        # Where a dtype is simulated, a module rounds what it receives and returns, and no operation of it.
        will_lose = 0 < entry.value.smallest <= self.form.flushes_to
        added = (_added_constant(each) for each in (entry, exact) if has_lost or will_lose)
        small = (constant for constant in added if 0 < constant <= self.form.flushes_to)
        constant = exact.value.lowest if has_lost and bounds and exact.value.lowest > 0 else next(small, 0.0)
        return f", because the constant {constant:.2g} of {source} is zero in {self.dtype}" if constant else ""

    def new_pole(self, entry: Reading) -> float | None:
        """Return the pole at which a value of the forward pass was computed, and in float32 was not; None for none."""
        exact = (self.healthy or {}).get(key_of(entry))
        of_float32 = None if exact is None else exact.inputs
        pole = next((pole for pole in poles_of(entry.operation) if reaches(entry.inputs, pole, of_float32)), None)
        # The norm of numbers of which only some are zero is not zero.
        is_there = pole or _at_zero(entry.value) > (0 if exact is None else _at_zero(exact.value))
        return pole if is_there else None

    @property
    def differentiated(self) -> Reading | None:
        """The root or logarithm of zero, in the forward pass, that a failing backward belongs to."""
        if self.place.direction == "forward":
            return None
        forward = (
            entry for entry in self.readings if entry.direction == "forward" and entry.module == self.place.module
        )
        at_poles = (entry for entry in forward if self.new_pole(entry) is not None)
        return next((entry for entry in at_poles if _differentiated(entry, self.place)), None)

    @property
    def function(self) -> str:
        """The operation that a failing backward belongs to, as `Fault` has it."""
        forward = self.differentiated
        return "" if forward is None else forward.operation

    def _own_pairs(self) -> Iterator[tuple[Reading, Reading]]:
        """Walk over those pairs that are in the module of the place."""
        return ((entry, exact) for entry, exact in self._pairs() if entry.module == self.place.module)

    def _pairs(self) -> Iterator[tuple[Reading, Reading]]:
        """Walk over values of the forward pass before the place, each with that of float32.

        Casts are numbered otherwise there.
        """
        for entry in self.readings:
            if entry is self.place:
                return
            exact = (self.healthy or {}).get(key_of(entry))
            if exact is not None and entry.direction == "forward" and family(entry.operation) != "cast":
                yield entry, exact

    @property
    def beyond(self) -> bool:
        """Whether float32's value does not fit into the dtype, nor what is cast to it."""
        inputs, value = self.place.inputs, self.place.value
        larger = inputs.largest > self.form.largest if inputs.elements else value.nonfinite > value.nan
        if family(self.place.operation) == "cast" and larger:
            return True
        if self.reference is None:
            return any(stats.largest > self.form.largest for stats in self.exact)
        scale = self.scale if self.place.direction == "backward" else 1.0
        return bool(self.reference.value.overflowed) or self.reference.value.largest * scale > self.form.largest


def _added_constant(entry: Reading) -> float:
    """Return by how much the lowest number grows by a constant; 0 where an operation has none, or several tensors.

    Whatever an operation is called: what zeros are no longer zero by has been added to them, and the largest number
    has grown by no more.
    """
    alone = entry.inputs.elements <= entry.value.elements + 1
    constant = entry.value.lowest - entry.inputs.lowest
    moves = abs(entry.value.largest - entry.inputs.largest) <= 1e-3 * entry.inputs.largest + abs(constant)
    adds = normalised(entry.operation) in _DIFFERENCES | _BOUNDS or (entry.inputs.zeros > entry.value.zeros and moves)
    return constant if alone and adds else 0.0


def _at_zero(value: Stats) -> int:
    """Count the elements that a root or a logarithm makes of zeros: 0 of a root, infinity of a logarithm."""
    return value.zeros + value.nonfinite


def _loses(value: Stats, exact: Stats) -> bool:
    """Return whether a value is zero or negative where it is not in float32."""
    return value.lowest < 0 <= exact.lowest or value.zeros > exact.zeros


def _cause(case: Case) -> Cause:
    """Return the kind, and what is said of the value, of a place whose inputs are finite: the first cause that fits."""
    finds = (_mask, _derivative_at_zero, _division, _undefined, _logarithm, _sum, _decomposition, _overflow)
    causes = (find(case) for find in finds)
    inputs = case.place.inputs
    of_finite = ", though its inputs are" if inputs.elements and not inputs.nonfinite else ""
    return next(filter(None, causes), ("model", f"is not finite{of_finite}"))


def _mask(case: Case) -> Cause | None:
    stats = next((stats for stats in case.exact if is_mask_constant(stats, case.form.largest)), None)
    if stats is None:
        return None
    return "mask", f"is -inf: {_constant_beyond(stats, case.dtype)}"


def _constant_beyond(stats: Stats, dtype: str) -> str:
    return f"the constant {stats.lowest:.3g} is below {dtype}'s lowest number, {-FORMATS[dtype].largest:.5g}"


def _derivative_at_zero(case: Case) -> Cause | None:
    forward = case.differentiated
    if forward is None:
        return None
    pole = case.new_pole(forward)
    at = f"inputs of {forward.operation} are {pole:g}"
    if not pole:
        at = f"{forward.inputs.zeros} of {forward.inputs.elements} inputs of {forward.operation} are zero"
    is_infinite = "may be infinite" if normalised(forward.operation) in _POWERS else "is infinite"  # by the exponent
    what = f"is not finite: {at}, where its derivative {is_infinite}"
    if case.cancelled is not None and case.reference is not None:
        return "digits", f"{what}, because {_of_difference(case.cancelled, case.dtype)}"
    at_pole = replace(case, place=forward, reference=(case.healthy or {}).get(key_of(forward)))
    lost = at_pole.lost_constant(pole or 0.0)
    if lost:
        return "epsilon", f"{what}{lost}"
    if at_pole.was_flushed:
        return "flush", f"{what}: in float32 they are {at_pole.exact[1].smallest:.2g}, which underflows in {case.dtype}"
    return "logarithm", what


def _division(case: Case) -> Cause | None:
    dtype, reference = case.dtype, case.reference
    if family(case.place.operation) != "division" or not case.divides_by_zero:
        return None
    if reference is None:
        return "division", "is not finite: it divides by zero"
    # What the dtype flushes is zero whatever was subtracted before.
    if case.cancelled is not None and case.holds_inputs:
        return "digits", f"is not finite: it divides by zero, because {_of_difference(case.cancelled, dtype)}"
    lost = case.lost_constant()
    smallest = "" if case.holds_inputs else f", whose smallest number is {case.form.smallest:.2g}"
    why = (
        f"is not finite: its divisor is zero in {dtype}{lost or smallest}; in float32 its smallest input is "
        f"{reference.inputs.smallest:.2g}"
    )
    return ("epsilon", why) if lost else ("division", f"{why}{_of_flushed(case)}")


def _undefined(case: Case) -> Cause | None:
    place, reference = case.place, case.reference
    outside = _outside(place.operation, place.inputs) if place.value.nan else None
    if outside is None:
        return None
    end, number = outside
    what = f"is NaN: {place.operation} of {number:.3g} is not defined"
    if reference is None or not reference.inputs.elements or _outside(place.operation, reference.inputs):
        return "logarithm", what
    if number < 0 <= reference.inputs.lowest and case.cancelled is not None:
        return "digits", f"{what}, because {_of_difference(case.cancelled, case.dtype)}"
    exact = getattr(reference.inputs, end)
    return "digits", f"{what}: its {end} input is {exact:.6g} in float32, and loses precision in {case.dtype} before"


def _outside(operation: str, inputs: Stats) -> tuple[str, float] | None:
    """Return at which end numbers are outside of what an operation is defined for, and that number; None for inside."""
    if family(operation) not in ("logarithm", "root") and normalised(operation) != "rsqrt":
        return None
    below, *above = poles_of(operation)
    if inputs.lowest < below:
        return "lowest", inputs.lowest
    return ("largest", inputs.largest) if inputs.largest > min(above, default=math.inf) else None


def _logarithm(case: Case) -> Cause | None:
    reference = case.reference
    if family(case.place.operation) != "logarithm":
        return None
    pole = case.new_pole(case.place)
    lost = "" if pole is None else case.lost_constant(pole)
    kind: Kind = "epsilon" if lost else "logarithm"
    if pole:
        return kind, f"is not finite: it is infinite at {pole:g}, to which {case.dtype} rounds its input{lost}"
    if not case.new_zeros:
        return None
    underflows = "" if case.holds_inputs else f" and underflows in {case.dtype}"
    zero = f", which is {reference.inputs.smallest:.2g} in float32{underflows}" if reference else ""
    if case.cancelled is not None:
        zero = f", because {_of_difference(case.cancelled, case.dtype)}"
    return kind, f"is not finite: it takes the logarithm of zero{lost or zero}"


def _sum(case: Case) -> Cause | None:
    inputs, form = case.place.inputs, case.form
    if family(case.place.operation) != "sum" or case.reference is None:
        return None
    if inputs.largest > form.largest or inputs.elements <= 2:
        return None
    computes = "multiplies" if "prod" in normalised(case.place.operation) else "adds"
    return "sum", (
        f"overflows {case.dtype}: it {computes} {inputs.elements} elements of up to {inputs.largest:.4g}, and "
        f"{case.exact_size}; {_largest(case.dtype)}"
    )


def _decomposition(case: Case) -> Cause | None:
    if family(case.place.operation) != "decomposition" or case.reference is None or case.beyond:
        return None
    return "digits", (
        f"is not finite: rounded to {_significand(case.dtype)}, its matrix may have no decomposition or inverse, which "
        f"it has in float32"
    )


def _overflow(case: Case) -> Cause | None:
    if case.beyond:
        scaled = case.place.direction == "backward" and case.scale != 1 and case.reference is not None
        times = f", times the loss scale of {case.scale:g}" if scaled else ""
        return "overflow", f"overflows {case.dtype}: it {case.exact_size}{times}, and {_largest(case.dtype)}"
    if case.float32_fails:
        return None
    return "overflow", (
        f"is not finite in {case.dtype}, though it {case.exact_size} and {_largest(case.dtype)}: an intermediate "
        f"result may overflow"
    )


def _largest(dtype: str) -> str:
    return f"{dtype}'s largest number is {FORMATS[dtype].largest:.5g}"


def _differentiated(entry: Reading, place: Reading) -> bool:
    """Return whether a value of the backward pass may be the derivative of a root, logarithm or power."""
    same_line = not (entry.place and place.place) or entry.place == place.place
    power = {normalised(entry.operation), normalised(place.operation)} <= _POWERS
    return same_line and (power or family(entry.operation) in ("root", "logarithm"))


def _of_flushed(case: Case) -> str:
    """Return which operation before the place makes zeros; "" where none is seen that does."""
    if case.flushed is None:
        return ""
    entry, exact = case.flushed
    return f", and {Place.of(entry).source} rounds numbers down to {exact.value.smallest:.2g} to zero"


def _of_difference(entry: Reading, dtype: str) -> str:
    """Return what became of a difference."""
    return (
        f"{Place.of(entry).source} subtracts numbers of up to {entry.inputs.largest:.4g} that {_significand(dtype)} "
        f"cannot tell apart"
    )


def _significand(dtype: str) -> str:
    return f"{dtype}'s {FORMATS[dtype].bits} bits of significand"


# -- a batch that fails ------------------------------------------------------------------------------------------------


def find_fault(
    low: Seen, reference: Seen, dtype: str, scale: float, settled: Seen | None = None, growth: Growth | None = None
) -> Fault | None:
    """Return what is suspected to be wrong with a batch; None for nothing.

    Args:
        low: The batch in the precision that fails, watched, with operations where the backend sees them.
        reference: The same batch in float32, watched alike.
        dtype: The precision, of `FORMATS`.
        scale: The loss scale of `low`.
        settled: The batch in that precision at a loss scale that its gradients fit, where that was tried.
        growth: How far training has diverged; None where it has not, or where nothing is known of earlier steps.
    """
    exact = by_key(reference.readings)
    forward = _of_finite(low, reference, exact, dtype)
    if low.finite:
        return forward or _of_hand(reference)
    if not reference.finite and settled is None:
        return _of_float32(reference, growth)
    if growth is not None:
        why = f"{growth}; {dtype} only fails first"
        return Fault("learning rate", why, low.readings)  # where it fails first is not at fault
    if settled is not None and settled.finite:
        return forward or flush_fault(settled, reference, dtype) or _of_scale(low, exact, scale)
    at_place = _of_place(low, exact, dtype, scale)
    # Gradients that only overflow may do so for what is wrong in the forward pass, which is asked about first.
    return forward if forward is not None and at_place.kind == "overflow" else at_place


def _of_place(low: Seen, exact: Mapping[Key, Reading], dtype: str, scale: float) -> Fault:
    """Say why the first value that is not finite is not."""
    position = first_failing(low.readings, exact)
    if position is None:
        seen = "though every value that was seen is: another may overflow"
        return Fault("overflow", f"the loss or a gradient is not finite in {dtype}, {seen}")
    case = _case(low, position, exact, dtype, scale)
    kind, why = _cause(case)
    zero = kind in ("division", "logarithm") and case.place.direction == "forward"
    cancels = case.cancelled is not None or (zero and case.holds_inputs)
    why = f"{Place.of(case.place)} {why}"
    return Fault(kind, why, low.readings, position, cancels=cancels, function=case.function)


def _case(low: Seen, position: int, exact: Mapping[Key, Reading], dtype: str, scale: float) -> Case:
    """Return a failing place with what is known of it in float32."""
    place = low.readings[position]
    # Casts are numbered otherwise in float32, where there are fewer: they are judged by what they are given.
    judged_alone = family(place.operation) == "cast" and bool(place.inputs.elements) and not place.inputs.nonfinite
    other = None if judged_alone else exact.get(key_of(place))
    return Case(place, other, dtype, low.readings, scale, healthy=exact)


def _of_scale(low: Seen, exact: Mapping[Key, Reading], scale: float) -> Fault:
    """Say that only the loss scale is too large: no value of the forward pass is wrong."""
    backward = [position for position, entry in enumerate(low.readings) if entry.direction == "backward"]
    first = first_failing([low.readings[position] for position in backward], exact)
    why = (
        f"the gradients overflow only because of the loss scale of {scale:g}: the step is skipped, and the scale backs "
        f"off until they fit"
    )
    return Fault("loss scale", why, low.readings, None if first is None else backward[first])


def flush_fault(settled: Seen, reference: Seen, dtype: str) -> Fault | None:
    """Say that gradients are zero at the loss scale that the largest of them fit; None where they are not."""
    exact = by_key(reference.readings)
    flushed = lost_gradients(settled, reference)
    if not flushed:
        return None
    position = first_flushed(settled, exact)
    what = "gradients underflow" if position is None else f"{Place.of(settled.readings[position])} underflows"
    why = (
        f"{what} to zero in {dtype}, even at the largest loss scale tried at which none overflows: most of the "
        f"gradient of {listed_names(flushed)} is lost"
    )
    return Fault("flush", why, settled.readings, position)


def lost_gradients(seen: Seen, reference: Seen) -> list[str]:
    """Return the names of parameters of whose gradient most is zero that is not in float32."""
    return [name for name, share in flushed_gradients(seen, reference).items() if share > MOST]


def first_flushed(seen: Seen, exact: Mapping[Key, Reading]) -> int | None:
    """Return the position of the first gradient most of which is zero that is not in float32; None for none."""
    for position, entry in enumerate(seen.readings):
        other = exact.get(key_of(entry)) if entry.direction == "backward" else None
        if other is not None and flushes(entry.value, other.value):
            return position
    return None


def schedule_fault(low: Seen, reference: Seen, decides: str) -> Fault:
    """Say by which number the script may have decided otherwise than in float32: a total that grows no more, if any.

    Args:
        low: The batch, with what the script computed before it.
        reference: The same in float32.
        decides: What it decided.
    """
    exact = by_key(reference.readings)
    stays = [at for at in _totals(low.readings) if not _stays(exact.get(key_of(low.readings[at])))]
    position = max(stays, key=lambda at: low.readings[at].inputs.smallest, default=None)
    if position is not None:
        total = low.readings[position]
        decides += (
            f": {Place.of(total)} loses precision: {total.inputs.largest:.4g} and {total.inputs.smallest:.3g} more are "
            f"{total.value.largest:.4g}"
        )
    return Fault("digits", decides, low.readings, position)


def _totals(readings: Sequence[Reading]) -> Iterator[int]:
    """Walk over the positions of sums that stay what they are, and were computed by the same line before."""
    before: dict[tuple[str, str, str], float] = {}
    for position, entry in enumerate(readings):
        line = entry.module, entry.operation, entry.place
        if _stays(entry) and before.get(line) == entry.inputs.largest:
            yield position
        before[line] = entry.value.largest


def _stays(entry: Reading | None) -> bool:
    """Return whether the sum of two numbers other than zero is one of them."""
    if entry is None or normalised(entry.operation) not in _DIFFERENCES or entry.inputs.zeros:
        return False
    return entry.inputs.elements == 2 * entry.value.elements == 2 and entry.value.largest == entry.inputs.largest


def gradient_fault(low: Seen, reference: Seen, dtype: str, scale: float) -> Fault | None:
    """Return the first gradient of a value that is wrong, of a batch whose forward pass is right; None for none."""
    exact = by_key(reference.readings)
    readings = unscaled(low.readings, scale, reference.readings)
    position = next(iter(wrong_values(readings, exact, dtype, "backward")), None)
    if position is None:
        return None
    place, other = low.readings[position], exact[key_of(readings[position])]
    factor = scale if carries_scale(place, scale, other) else 1.0
    underflows = flushes(place.value, other.value) and other.value.smallest * factor <= FORMATS[dtype].flushes_to
    what, error = "underflows" if underflows else "loses precision", percent(error_of(readings[position], other))
    why = f"{Place.of(place)} {what}: it is {error} from float32's, and the forward pass of this step agrees"
    return Fault("flush" if underflows else "digits", why, low.readings, position)


def _of_hand(reference: Seen) -> Fault | None:
    """Say that the script itself casts to a dtype what this cannot hold; None where it does not, or without harm."""
    position = overflow_by_hand(reference.readings)
    if position is None:
        return None
    place, later = reference.readings[position], reference.readings[position:]
    lost = next((entry for entry in later if _is_all_lost(entry)), None)
    if reference.finite and lost is None:
        return None
    what = "" if lost in (None, place) else f", and {Place.of(lost)} is not finite in all {lost.value.elements}"
    why = (
        f"{Place.of(place)} overflows {place.dtype} in {place.value.nonfinite} of {place.value.elements} elements"
        f"{what}: the script itself casts to {place.dtype} there, in float32 runs, too, so what float32 would compute "
        f"is not known"
    )
    kind: Kind = "sum" if family(place.operation) == "sum" else "overflow"
    return Fault(kind, why, reference.readings, position, reference.finite, by_hand=True)


def _is_all_lost(entry: Reading) -> bool:
    """Return whether nothing of a value in low precision is left, where it has several elements."""
    return entry.direction == "forward" and is_low(entry) and 1 < entry.value.elements == entry.value.nonfinite


def loss_error(low: Seen, reference: Seen) -> float:
    """Return how far a loss is from float32's, relative to the largest so far: a small one says little of training."""
    exact = reference.replayed.loss
    size = max(abs(exact), reference.largest_loss)
    return abs(low.replayed.loss - exact) / size if size else 0.0


def loss_is_wrong(low: Seen, reference: Seen) -> bool:
    """Return whether a loss is further from float32's than rounding explains."""
    return loss_error(low, reference) > (WRONG if reference.tolerance is None else reference.tolerance)


def _of_finite(low: Seen, reference: Seen, exact: Mapping[Key, Reading], dtype: str) -> Fault | None:
    """Say what is wrong with a batch whose loss is finite: an infinity that became zero, say; None for nothing."""
    if not math.isfinite(low.replayed.loss) or not math.isfinite(reference.replayed.loss):
        return None
    error = loss_error(low, reference)
    position = first_wrong(low.readings, exact, dtype, loss_is_wrong(low, reference))
    if position is None:
        return None
    place = low.readings[position]
    other = exact.get(key_of(place))
    before = place.inputs if other is None else other.value
    kind: Kind
    if place.value.nonfinite:
        kind, why = _cause(Case(place, other, dtype, low.readings, healthy=exact))
    elif flushes(place.value, before) and _divides_by_overflow(place, before, FORMATS[dtype]):
        kind = "overflow"
        why = (
            f"is zero: its divisor overflows {dtype}, and {_largest(dtype)}; in float32 the quotient is up to "
            f"{before.largest:.4g}"
        )
    elif flushes(place.value, before) and not _cancels(place, other, FORMATS[dtype]):
        kind = "flush"
        form = FORMATS[dtype]
        underflows = before.smallest <= form.flushes_to
        smallest = f", whose smallest number is {form.smallest:.2g}" if underflows else ""
        why = (
            f"{'underflows' if underflows else 'loses all precision'}: {place.value.zeros} of {place.value.elements} "
            f"elements are zero in {dtype}{smallest}, and in float32 they are up to {before.largest:.4g}"
        )
    else:
        kind = "digits"
        why = (
            f"loses precision: it is {percent(error_of(place, other))} from float32's, because "
            f"{_significand(dtype)} are too few for the numbers that it is computed from"
        )
    why = f"{Place.of(place)} {why}; the loss stays finite, {percent(error)} from float32's"
    return Fault(kind, why, low.readings, position, stays_finite=True)


def _divides_by_overflow(place: Reading, exact: Stats, form: Format) -> bool:
    """Return whether a quotient is zero that the dtype holds, and what is divided is not: the divisor is infinite."""
    divides = normalised(place.operation) in _QUOTIENTS and not place.inputs.zeros
    return divides and exact.smallest > form.flushes_to


def _cancels(place: Reading, exact: Reading | None, form: Format) -> bool:
    """Return whether a value is zero of rounded inputs, and not because it is too small for its dtype.

    No sum of two numbers is too small: it is a multiple of the last digit of its smaller term. Nor is what the dtype
    holds. Inputs that were zero before have been flushed; of a module it is not known what it computes.
    """
    flushed = exact is not None and flushes(place.inputs, exact.inputs)
    held = exact is not None and bool(place.operation) and exact.value.smallest > form.flushes_to
    return not flushed and (held or normalised(place.operation) in _DIFFERENCES)


# -- float32 fails, too ------------------------------------------------------------------------------------------------


def _of_float32(reference: Seen, growth: Growth | None) -> Fault:
    """Say why a batch fails in float32: the first of these that fits."""
    position = first_failing(reference.readings, None)
    of_place = None if position is None else _at_place(reference, position)
    for find in (_broken_weights, _cast_by_hand, _masked_row, _received, _diverged):
        fault = find(reference, position, growth)
        if fault is not None:
            return fault
    if of_place is None or of_place.kind == "model":  # no number of another size would help what the operation does
        fault = _large_weights(reference, position) or _large_data(reference, position)
    return fault or of_place or Fault("model", "the loss or a gradient is not finite in float32, either")


def _at_place(reference: Seen, position: int) -> Fault:
    """Say why an operation fails in float32."""
    place = reference.readings[position]
    case = Case(place, None, "float32", reference.readings, float32_fails=True)
    kind, why = _cause(case)
    why = f"{Place.of(place)} {why}; float32 fails, too"
    return Fault(kind, why, reference.readings, position, function=case.function)


def _broken_weights(reference: Seen, position: int | None, growth: Growth | None) -> Fault | None:
    broken = [name for name, stats in reference.replayed.parameters.items() if stats.nonfinite]
    if not broken:
        return None
    names = listed_names(broken)
    why = f"the weights are not finite already ({names}): inf or NaN was written to them before this loss was computed"
    return Fault("weights", why, reference.readings, position)


def _cast_by_hand(reference: Seen, position: int | None, growth: Growth | None) -> Fault | None:
    fault = _of_hand(reference)
    before = fault is not None and fault.position is not None and (position is None or fault.position <= position)
    return fault if before else None


def _masked_row(reference: Seen, position: int | None, growth: Growth | None) -> Fault | None:
    row = masked_whole(reference.readings)
    if row is None:
        return None
    place = reference.readings[row]
    why = f"{Place.of(place)} is NaN: {_of_infinities(place)}, in float32, too"
    return Fault("mask", why, reference.readings, row)


def _of_infinities(place: Reading) -> str:
    """Return how an operation makes NaN of the infinities of a mask."""
    word = normalised(place.operation or place.kind)
    if place.direction == "forward" and ("softmax" in word or "attention" in word):
        return "all of a row is masked by -inf, and what remains is 0/0"
    if word in _PRODUCTS:
        return "an infinity of a mask is multiplied by zero"
    if word in _DIFFERENCES:
        return "infinities of a mask are subtracted from each other, as where all of a row is masked"
    return "of the infinities of a mask it computes what is not defined"


def _received(reference: Seen, position: int | None, growth: Growth | None) -> Fault | None:
    """Say where values that nothing computed come from: from the batch, or else they are the module's own."""
    place = None if position is None else reference.readings[position]
    if place is None or place.direction == "backward":
        return None
    if normalised(place.operation) == _READ:
        return _broken_parameter(reference, position, place)
    model = outermost(reference.readings, place.module) if place.kind else None
    came_with_it = model is not None and model.inputs.nonfinite > 0
    if not place.inputs.nonfinite or not (came_with_it or _nothing_computed(reference.readings[:position])):
        return None
    if came_with_it or model is None:
        return _broken_batch(reference, position, place, came_with_it)
    return _broken_parameter(reference, position, place)


def _broken_batch(reference: Seen, position: int | None, place: Reading, came_with_it: bool) -> Fault:
    why = (
        f"{'the batch is' if came_with_it else 'the batch, or what a former step left, is'} not finite: "
        f"{place.inputs.nonfinite} of {place.inputs.elements} inputs of {Place.of(place).source} are inf or NaN, and "
        f"no operation computed them"
    )
    return Fault("data", why, reference.readings, position)


def _broken_parameter(reference: Seen, position: int | None, place: Reading) -> Fault:
    if _makes_nan(place):  # of what no optimizer writes: a mask is multiplied by zero, say
        why = (
            f"{Place.of(place)} is NaN, in float32, too: {place.inputs.nonfinite} of {place.inputs.elements} inputs "
            f"are infinite, and they are the module's own, as those of a mask"
        )
        return Fault("mask", why, reference.readings, position)
    why = (
        f"what {Place.of(place).source} reads is not finite, though the inputs of the model are: an earlier step may "
        f"have written inf or NaN to its weights"
    )
    return Fault("weights", why, reference.readings, position)


def _makes_nan(place: Reading) -> bool:
    """Return whether an operation that reads no weights, as far as is known, makes NaN of infinities."""
    infinite = place.inputs.nonfinite and not place.inputs.nan
    return bool(infinite and place.value.nan) and family(place.operation) not in ("matmul", "norm")


def _nothing_computed(readings: Sequence[Reading]) -> bool:
    """Return whether no operation makes what is not finite of what is."""
    return not any(map(is_origin, readings))


def _diverged(reference: Seen, position: int | None, growth: Growth | None) -> Fault | None:
    return None if growth is None else Fault("learning rate", str(growth), reference.readings)


def _large_weights(reference: Seen, position: int | None) -> Fault | None:
    largest = {name: stats.largest for name, stats in reference.replayed.parameters.items()}
    name = max(largest, key=lambda name: largest[name], default="")
    if not name or largest[name] <= LARGE_WEIGHT:
        return None
    why = (
        f"weights are as large as {largest[name]:.3g} ({name}), and float32 fails, too: the learning rate may be "
        f"too large"
    )
    return Fault("learning rate", why, reference.readings, position)


def _large_data(reference: Seen, position: int | None) -> Fault | None:
    received = (entry for entry in reference.readings if entry.inputs.elements)
    entry = outermost(reference.readings) or next(received, None)
    if entry is None or entry.inputs.largest <= LARGE_INPUT:
        return None
    why = (
        f"the inputs of {Place.of(entry).source} are up to {entry.inputs.largest:.3g}, and float32 cannot hold their "
        f"squares"
    )
    return Fault("data", why, reference.readings, position)


# -- what raises -------------------------------------------------------------------------------------------------------


def refusal_fault(refusal: Refusal, reference: Seen, dtype: str) -> Fault:
    """Say why a framework raises in low precision what it does not raise in float32: for a constant, as a rule.

    The place is one in float32: the first value that the run that raised did not come to.
    """
    readings, form = reference.readings, FORMATS[dtype]
    missed = _missed(refusal.seen, readings)
    constant = next((position for position in missed if _overflows_as_mask(readings[position], form)), None)
    # Which casts there are depends on the dtype.
    position = next((position for position in missed if family(readings[position].operation) != "cast"), None)
    if constant is None:
        return _refused_at(refusal, readings, position, dtype)
    place = Place.of(readings[constant])
    raised = f"{place} cannot be computed"
    may = f"the step cannot be computed in {dtype}, and it may be for {place}"
    why = f"{raised if constant == position else may}: {_constant_beyond(place.value, dtype)} ({refusal.message})"
    return Fault("mask", why, readings, constant)


def _refused_at(refusal: Refusal, readings: Sequence[Reading], position: int | None, dtype: str) -> Fault:
    """Say that the framework raises at the first value that was not reached, or at a line before it.

    If it is another line that raised, what is computed there is not seen: the line is the place, in the same module.
    """
    if position is not None and refusal.line and readings[position].place not in ("", refusal.line):
        entry = replace(readings[position], operation="", place=refusal.line)
        readings = (*readings[:position], entry, *readings[position + 1 :])
    place = None if position is None else Place.of(readings[position])
    what = str(place) if place is not None and (place.module or place.operation) else "the step"
    line = f" ({refusal.line})" if refusal.line and refusal.line not in what else ""
    why = f"{what}{line} cannot be computed in {dtype}, only in float32: {refusal.message}"
    return Fault("error", why, readings, position)


def _missed(seen: Sequence[Reading], readings: Sequence[Reading]) -> list[int]:
    """Return the positions of values that another run did not come to."""
    reached = {key_of(entry) for entry in seen}
    return [position for position, entry in enumerate(readings) if key_of(entry) not in reached]


def _overflows_as_mask(entry: Reading, form: Format) -> bool:
    return entry.direction == "forward" and is_mask_constant(entry.value, form.largest)
