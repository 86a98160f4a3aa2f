"""Find where a batch first fails, and why: precision, the data, the learning rate, or the model itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ampx.backend import MODULE, prepare_line
from ampx.errors import AmpxError
from ampx.formats import FORMATS, Format
from ampx.policy import OptLevel

from .batch import FLOAT32, INIT_SCALE, Batch, Refusal, Seen, fitting_scale, in_one_line, plain
from .causes import (
    Fault,
    Growth,
    Kind,
    find_fault,
    flush_fault,
    gradient_fault,
    loss_error,
    loss_is_wrong,
    refusal_fault,
    schedule_fault,
)
from .chain import Link, chain
from .compare import by_key, module_errors, unscaled, worst_errors
from .cures import PRECISION, Again, Change, Experiment, Search, entry_in_every_model, is_output, ran_before
from .forcing import is_part, kept_in_float32, rounded_alone
from .operations import normalised, poles_of
from .places import WRONG, Place, last_finite
from .probe import Reading, Stats, Step, Watching
from .risks import Risk, risks
from .tolerance import percent

# Elements of each value that are compared with float32's.
SAMPLES: Final = 1024


@dataclass(frozen=True)
class Diagnosis:
    """Where a batch first fails, and why.

    Attributes:
        kind: What fails; `"healthy"` where nothing does. The reference has a table of all kinds.
        dtype: What was computed in.
        scale: The loss scale.
        loss: The loss.
        reference_loss: The loss in float32.
        float32_fails: Float32 fails on this batch, too.
        last_finite: The last place before that at which all is finite; None where it is the batch itself.
        first_nonfinite: The first place that is not finite; of an `"error"` the place that raises, in float32.
        why: One sentence.
        advice: What to do, as code; empty where nothing is to be done. What was not tried is said to be so.
        risks: What may do harm elsewhere.
        experiments: The batch, run again with what was expected to cure it, in order.
        deny: What cures it, as entries of `deny` in a policy file of `ampx run`; empty where that was not seen. There
            a module is meant in every model, and a second model as a whole is named by its class, with a colon.
        chain: The values that lead to the place where the batch first fails, back to one that agrees with float32.
        by_hand: The script itself casts there: float32 computes it in low precision, too.
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
    experiments: tuple[Experiment, ...] = ()
    deny: tuple[str, ...] = ()
    chain: tuple[Link, ...] = ()
    by_hand: bool = False

    @property
    def precision_is_innocent(self) -> bool:
        """Whether the batch fails whatever the precision, or does not fail at all."""
        return self.float32_fails or self.kind in ("healthy", "loss scale", "data", "weights", "learning rate", "model")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; numbers that are not finite are strings."""
        result: dict[str, Any] = plain(self)
        for entry, experiment in zip(result["experiments"], self.experiments, strict=True):
            entry["text"] = str(experiment)
        return {**result, "precision_is_innocent": self.precision_is_innocent}

    def __str__(self) -> str:
        """Return what fails and why, what cures it, the bracket, what to do, and the risks that bear on it, as text."""
        lines = [f"{self.why[0].upper()}{self.why[1:]}", *self._tried(), *self._bracket()]
        if self.advice:
            lines += ["", *(f"    {line}" for line in self.advice.splitlines())]
        return "\n".join([*lines, *(f"  risk: {risk.text}" for risk in self.risks)])

    def _tried(self) -> list[str]:
        cures = [entry for entry in self.experiments if entry.cures]
        return [f"  cure, tried: {cures[-1]}"] if cures else [f"  no cure: {entry}" for entry in self.experiments]

    def _bracket(self) -> list[str]:
        place, before = self.first_nonfinite, self.last_finite
        if place is None:
            return []
        if self.kind == "error":
            return [f"  raises: {place}; in float32 from {_range(place.inputs)}"]
        last, first = ("finite", "non-finite") if place.value.nonfinite else ("right", "wrong")
        lines = [] if before is None else [f"  {f'last {last}:':<18}{before}: {_range(before.value)}"]
        inputs = f", from {_range(place.inputs)}" if place.inputs.elements else ""
        lines.append(f"  {f'first {first}:':<18}{place}: {_range(place.value)}{inputs}")
        if len(self.chain) < _ENDS:
            return lines
        return [*lines, *(f"  {'' if number else 'on the way:':<18}{link}" for number, link in enumerate(self.chain))]


_ENDS: Final = 3  # a shorter chain has what the bracket says


def _range(stats: Stats) -> str:
    if not stats.elements:
        return "nothing"
    finite = f"of magnitude {stats.smallest:.3g} to {stats.largest:.3g}, lowest {stats.lowest:.3g}"
    if not stats.nonfinite:
        return f"values {finite}" if stats.largest else "zeros"
    several = f"not finite, {stats.nan} of them NaN"
    kind = "infinite" if not stats.nan else "NaN" if stats.nan == stats.nonfinite else several
    others = f", the others {finite if stats.largest else 'zeros'}" if stats.nonfinite < stats.elements else ""
    return f"{stats.nonfinite} of {stats.elements} {kind}{others}"


# -- what to do --------------------------------------------------------------------------------------------------------


_CLEAR: Final = WRONG / 4  # what cures a training whose losses part brings them this close, and noise does not
_EPSILON: Final = 1e-6  # less is no help: what is divided by it overflows soon
_SMALLER: Final = "x = x - x.max()  # before exp, as softmax and logsumexp do; softplus(x) for log(1 + exp(x))"
_REGION: Final = (
    "with ampx.autocast(enabled=False):  # may cure it: around the lines that compute this, from inputs in float32\n"
    "    ..."
)
_BY_HAND: Final = (
    "# may cure it, and was not tried: cast to float32 before the operation above, or leave out the cast;\n"
    "# no option changes what the script itself casts"
)
_WIDE: Final = 'amp = ampx.init(dtype="bfloat16")'
_UNTRIED: Final = "# may cure it, and was not tried:\n"
_CLIP: Final = "opt = ampx.wrap_optimizer(opt, max_grad_norm=1.0)"


@dataclass(frozen=True)
class Setting:
    """In what a batch is computed.

    Attributes:
        dtype: The precision, of `FORMATS`.
        scale: The loss scale.
        prepare_finds_modules: As in `ampx.Backend`, for the lines that are advised.
    """

    dtype: str
    scale: float
    prepare_finds_modules: bool = False


def _keeps(modules: Collection[str], tried: bool) -> str:
    return f"{'' if tried else 'may cure it: '}keep {'it' if len(modules) == 1 else 'them'} in float32"


def _denied(modules: Iterable[str], setting: Setting, tried: bool) -> str:
    """Return the lines that keep modules in float32; "" for none that has a name.

    Of a second model a name begins with its class and a colon, which `prepare` of that model does not know.
    """
    parts = {name: name.rpartition(":") for name in modules}
    in_a_file = list(dict.fromkeys(map(entry_in_every_model, parts)))
    entries = [f"{MODULE}{name}" for _, _, name in parts.values() if name]
    models = list(dict.fromkeys(kind for kind, _, _ in parts.values() if kind))
    keeps = _keeps(parts, tried)
    if not entries:  # a model as a whole, or nothing
        return f"deny = {in_a_file!r}  # in a policy file: {keeps}" if models else ""
    which, policy = "which has that module", ""
    if models:
        which, policy = f"the {' and the '.join(models)}", f"; in a policy file: {in_a_file!r}"
    init = f"amp = ampx.init(dtype={setting.dtype!r}, deny={entries!r})  # {keeps}"
    prepare = prepare_line(entries, setting.prepare_finds_modules)
    return "\n".join([init, *(f"{line}  # {which}, before wrap_optimizer{policy}" for line in prepare)])


def _in_the_script(fault: Fault, dtype: str) -> str:
    """Return what may be changed in the script itself, which cannot be tried from outside; "" for nothing."""
    form, operation = FORMATS[dtype], "" if fault.place is None else fault.function or fault.place.operation
    largest_epsilon = max(2 * form.smallest_normal, _EPSILON)
    lines: dict[Kind, str] = {
        "overflow": _SMALLER if normalised(operation) == "exp" else "",
        "epsilon": f"eps = {largest_epsilon:.1g}  # {dtype} holds it; next to 1 it needs {2.0 ** (1 - form.bits):.1g}",
        "mask": f"mask_value = {-form.largest / 2:.4g}  # {dtype} holds it, and exp of it is 0",
        "logarithm": _clipped(operation, form),
        "division": f"x = y / (z + {largest_epsilon:.1g})",
        "data": "assert numpy.isfinite(batch).all()  # in the data pipeline: drop or mend the sample",
        "weights": f"# load the last checkpoint with finite weights, and skip steps whose gradients are not:\n{_CLIP}",
        "learning rate": f"{_CLIP}  # and a smaller learning rate or weight decay",
        "model": "# look at the operation above: float32 does not help",
    }
    return lines.get(fault.kind, "")


def _clipped(operation: str, form: Format) -> str:
    """Return the line that keeps numbers from where a function, or its derivative, is infinite."""
    poles = poles_of(operation)
    margins = [2.0 ** (1 - form.bits) if pole else max(form.smallest_normal, _EPSILON) for pole in poles]
    (low, small), *high = zip(poles, margins, strict=True)
    bounds = [f"{low:g} + {small:.1g}" if low else f"{small:.1g}", *(f"{pole:g} - {gap:.1g}" for pole, gap in high)]
    where = " and ".join(f"{pole:g}" for pole in poles)
    return f"x = x.clip({', '.join(bounds)})  # before {operation}: it, or its derivative, is infinite at {where}"


def _of_cure(cure: Change, setting: Setting) -> str:
    """Return what was seen to cure it, as code."""
    if cure.dtype is not None:
        return _WIDE
    if cure.operations:
        return f"amp = ampx.init(dtype={setting.dtype!r}, deny={[*cure.operations]!r})  # keep it in float32"
    return _denied(cure.float32, setting, True) or _REGION


def _untried(fault: Fault, setting: Setting, float32_fails: bool, tried: bool) -> str:
    """Return what may cure it, as code, where nothing was seen to."""
    if fault.by_hand:
        return _BY_HAND
    own = _in_the_script(fault, setting.dtype)
    if not float32_fails and fault.kind in PRECISION:
        return _in_float32(fault, setting, tried, own)
    return f"{_UNTRIED}{own}" if own and fault.kind not in ("data", "model") else own


def _in_float32(fault: Fault, setting: Setting, tried: bool, own: str) -> str:
    """Return the lines that keep the place in float32 unless that was tried, and others; `own` changes the script."""
    fits = not tried and setting.dtype == "float16" and fault.kind in ("overflow", "sum", "flush")
    more = [text for text in (own, _WIDE if fits else "") if text]
    module = "" if fault.place is None else fault.place.module
    if tried and module:
        return "\n".join(f"{_UNTRIED}{text}" for text in more)
    first = _denied((module,), setting, False) or _REGION
    return "\n".join([first, *(f"# or, which was not tried:\n{text}" for text in more)])


# -- diagnosis ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suspect:
    """A batch that may fail, and what is known of it.

    Attributes:
        low: The batch in the precision that may fail; the reference itself where nothing was cast.
        reference: The batch in float32, from the same random numbers, watched alike.
        setting: In what it was computed.
        again: Runs the batch in that precision with a change; None where nothing is to be tried.
        compared: Returns what changes are compared with, as `Search` takes it; None for `reference`.
        growth: How far training has diverged in float32, if it has.
        decides: What the script decided otherwise than in float32, by what it computed before; "" for nothing.
        parts: Training is wrong at this batch, whatever the batch itself computes: gradients of former ones were wrong,
            or their weights.
        weights: That the weights are wrong, if they are.
    """

    low: Seen | Refusal
    reference: Seen
    setting: Setting
    again: Again | None = None
    compared: Callable[[], Seen] | None = None
    growth: Growth | None = None
    parts: bool = False
    decides: str = ""
    weights: Fault | None = None

    def trials(self) -> _Trials | None:
        """Return what tries changes; None where there are none to try, or float32 fails, too."""
        if self.again is None or not self.reference.finite:
            return None
        return _Trials(self.again, functools.cache(self.compared or (lambda: self.reference)))

    def fault(self, settled: Seen | None = None) -> Fault | None:
        """Return what is suspected; see `find_fault`."""
        dtype, scale = self.setting.dtype, self.setting.scale
        if isinstance(self.low, Refusal):
            return refusal_fault(self.low, self.reference, dtype)
        if self.decides and self.low.finite:
            return schedule_fault(self.low, self.reference, self.decides)
        return find_fault(self.low, self.reference, dtype, scale, settled, self.growth)

    def gradient_fault(self) -> Fault | None:
        """Return what may be wrong with weights or gradients where the forward pass is right; None for nothing."""
        assert isinstance(self.low, Seen)
        dtype, scale = self.setting.dtype, self.setting.scale
        if self.parts:
            return self.weights or gradient_fault(self.low, self.reference, dtype, scale)
        # At a larger loss scale, if there is one, they may not be zero.
        is_largest = fitting_scale(dtype, self.reference) <= scale < INIT_SCALE
        return flush_fault(self.low, self.reference, dtype) if is_largest else None


def examined(batch: Suspect) -> Diagnosis:
    """Say where a batch first fails, and why."""
    fault, trials = batch.fault(), batch.trials()
    if fault is None:
        diagnosis = _if_cured(batch, batch.gradient_fault(), trials)
        return diagnosis if diagnosis.kind != "healthy" or trials is None else _by_module(batch, trials) or diagnosis
    if trials is None or fault.kind not in PRECISION:
        return _concluded(batch, fault, trials)
    trials = trials.at_scale(batch.setting)
    if isinstance(batch.low, Seen) and trials.may_settle(batch.low, fault):
        trials = trials.settled()
        if isinstance(trials.fails, Seen):  # the loss scale is not why, and would only hide what is
            batch = replace(batch, low=trials.fails, setting=replace(batch.setting, scale=1.0))
        fault = batch.fault(trials.seen)
    return _concluded(batch, fault, trials)


def _if_cured(batch: Suspect, fault: Fault | None, trials: _Trials | None) -> Diagnosis:
    """Say which gradient is wrong or zero, if a change cures it: nothing else shows that it is a fault."""
    diagnosis = _concluded(batch, fault, trials)
    cured = any(entry.cures and entry.error < _closest(batch.reference) for entry in diagnosis.experiments)
    return diagnosis if diagnosis.deny and cured else _concluded(batch, None, trials)


def _by_module(batch: Suspect, trials: _Trials) -> Diagnosis | None:
    """Name the smallest module with which in float32 a wrong loss is right, though no value is seen to be wrong.

    None where the loss is not wrong, or no module cures it. Of a loss that is off by little, what rounds otherwise may
    bring it nearer to float32's without being why.
    """
    low, reference, dtype = batch.low, batch.reference, batch.setting.dtype
    assert isinstance(low, Seen)
    if not (batch.parts or loss_is_wrong(low, reference)):
        return None
    off = loss_error(low, trials.compared())
    if off <= WRONG:
        return None
    search = Search(Fault("digits", "", low.readings), trials.compared, dtype, trials.again, trials.scale)
    errors = worst_errors(module_errors(reference.readings, low.readings, dtype), "forward")
    cure = search.smallest_module([entry.module for entry in errors], _closest(reference))
    if cure is None:
        return None
    begins, ends = _span(low.readings, cure.module)
    others = ", or what is computed of its output," if cure.widens else ""
    why = (
        f"module {cure.module!r}{others} loses precision in {dtype}: the loss is {percent(off)} from float32's, and "
        f"with that module in float32 {percent(cure.experiment.error)}; no single value was seen to be wrong"
    )
    experiments = [*(entry for entry in search.experiments if entry is not cure.experiment), cure.experiment]
    fault = Fault("digits", why, low.readings, ends, stays_finite=True)
    diagnosis = _diagnosis(batch, fault, Change((cure.module,), scale=trials.scale), experiments)
    # Which values in the module are right is not known.
    return replace(diagnosis, last_finite=last_finite(low.readings, begins), chain=())


def _span(readings: Sequence[Reading], module: str) -> tuple[int, int]:
    """Return the positions of the first value of a module, or of one in it, and of its last output."""
    own = [at for at, entry in enumerate(readings) if is_part(entry.module, module)]
    return own[0], max(at for at in own if is_output(readings[at], [module]))


def _closest(reference: Seen) -> float:
    """Return how close to float32's a loss is that was cured: noise does not bring it there."""
    return min(_CLEAR, reference.tolerance or _CLEAR)


@dataclass(frozen=True)
class _Trials:
    """What tries changes of a batch that fails.

    Attributes:
        again: Runs the batch with a change.
        compared: Returns what changes are compared with.
        scale: The loss scale that the gradients of float32 fit; None for that of the batch.
        seen: The batch at a scale that its gradients fit; None where that was not tried, or they fit none.
        fails: The batch at a scale of 1, where its gradients fit not even that.
    """

    again: Again
    compared: Callable[[], Seen]
    scale: float | None = None
    seen: Seen | None = None
    fails: Seen | Refusal | None = None

    def at_scale(self, setting: Setting) -> _Trials:
        """Return it for the loss scale that the gradients fit, where there is one."""
        if setting.scale == 1:
            return self
        return replace(self, scale=min(setting.scale, fitting_scale(setting.dtype, self.compared())))

    def may_settle(self, low: Seen, fault: Fault) -> bool:
        """Return whether a smaller loss scale may be all that the batch needs."""
        return self.scale is not None and low.only_gradients_overflow and not fault.stays_finite

    def settled(self) -> _Trials:
        """Run the batch at the loss scale, and at 1 where its gradients overflow even there."""
        for scale in dict.fromkeys((self.scale, 1.0)):
            seen = self.again(Change(scale=scale), ())
            if isinstance(seen, Seen) and seen.finite:
                return replace(self, scale=scale, seen=seen)
        return replace(self, scale=1.0, fails=seen)


def _concluded(batch: Suspect, fault: Fault | None, trials: _Trials | None) -> Diagnosis:
    """Return the diagnosis of a fault, after trying what may cure it."""
    fault = fault or Fault("healthy", f"the loss and all gradients are finite in {batch.setting.dtype}")
    producer, cure, experiments = _tried(fault, batch.setting.dtype, trials)
    return _diagnosis(batch, producer, cure, experiments, fault)


def _diagnosis(
    batch: Suspect, fault: Fault, cure: Change | None, experiments: Sequence[Experiment], shown: Fault | None = None
) -> Diagnosis:
    """Return the diagnosis of a fault, with what was tried; `shown` is where it shows, if that is elsewhere."""
    setting, reference = batch.setting, batch.reference
    low = batch.low if isinstance(batch.low, Seen) else None
    fails = not reference.finite and not fault.by_hand
    links = _links(shown or fault, low, reference, setting)
    place, position = fault.place, fault.position
    return Diagnosis(
        fault.kind,
        setting.dtype,
        setting.scale,
        math.nan if low is None else low.replayed.loss,
        reference.replayed.loss,
        fails,
        None if position is None else last_finite(fault.readings, position),
        None if place is None else Place.of(place),
        f"{fault.why}.",
        _of_cure(cure, setting) if cure is not None else _untried(fault, setting, fails, bool(experiments)),
        () if low is None else _bearing(fault, low, reference, setting),
        tuple(experiments),
        () if cure is None else cure.deny,
        links,
        fault.by_hand,
    )


def _tried(fault: Fault, dtype: str, trials: _Trials | None) -> tuple[Fault, Change | None, list[Experiment]]:
    """Return a fault, of the module that produces it, what cures it, and what was tried for that."""
    if trials is None:
        return fault, None, []
    search = Search(fault, trials.compared, dtype, trials.again, trials.scale)
    cure = search.cure(trials.seen)
    if cure is not None and search.producer is not None:
        fault = _of_producer(fault, search.producer, dtype)
    return fault, cure, search.experiments


def _links(fault: Fault, low: Seen | None, reference: Seen, setting: Setting) -> tuple[Link, ...]:
    """Return what leads to the place of a fault, where that is a value in low precision."""
    if low is None or fault.position is None or fault.readings is not low.readings or low is reference:
        return ()
    readings = unscaled(low.readings, setting.scale, reference.readings)
    return chain(readings, fault.position, by_key(reference.readings), setting.dtype)


_OF_CONSTANTS: Final = ("mask", "epsilon", "division", "logarithm")


def _bearing(fault: Fault, low: Seen, reference: Seen, setting: Setting) -> tuple[Risk, ...]:
    """Return the risks without those that have nothing to do with a fault: those of other modules, or of constants."""
    if fault.kind == "healthy":
        return risks(low, reference, setting.dtype, setting.scale)
    place = fault.place
    own = (risk for risk in risks(low, reference, setting.dtype) if place is not None and place.module in risk.where)
    return tuple(risk for risk in own if risk.kind != "constant" or fault.kind in _OF_CONSTANTS)


def _of_producer(fault: Fault, producer: int, dtype: str) -> Fault:
    """Name the value that lost what is missed at the place: float32 there cures it, and not at the place.

    An operation is kept in float32 wherever it is: of several it is not known which one lost it.
    """
    entry = fault.readings[producer]
    loses = "may lose" if entry.operation and ran_before(fault.readings, producer) else "loses"
    why = f"{Place.of(entry)} {loses} precision in {dtype} that is needed later: {fault.why}"
    return replace(fault, kind="digits", why=why, position=producer)


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

    Example:
        >>> print(ampx.diagnose(lambda model: loss_fn(model(x), y), model, dtype="float16"))
    """
    batch = Batch(step, model, framework, device)
    chosen = batch.dtype(dtype)
    casting = batch.casting(chosen, level, allow, deny)
    # Where a dtype is simulated, operations may be those of the rounding, too.
    operations = not casting.simulated or batch.probe.rounds_unseen
    watching = Watching(dtype=chosen, operations=operations, samples=SAMPLES)
    reference = batch.run(watching=watching)
    scale = fitting_scale(casting.dtype, reference) if loss_scale is None else loss_scale
    setting = Setting(chosen, scale, batch.backend.prepare_finds_modules)
    if casting is FLOAT32:
        return examined(Suspect(reference, reference, setting))

    def again(change: Change, modules: Sequence[str]) -> Seen | Refusal:
        try:
            changed = batch.casting(change.dtype or chosen, level, allow, (*deny, *change.operations))
            forced = {**changed.forced, **kept_in_float32(change.float32, modules)}
            if change.rounded:
                forced |= rounded_alone(change.rounded, modules, change.bits)
            return batch.run(replace(changed, forced=forced), scale if change.scale is None else change.scale, watching)
        except Exception as error:  # of the framework, which does not refuse float32
            return Refusal(in_one_line(error), batch.read_before_error)

    try:
        low: Seen | Refusal = batch.run(casting, scale, watching)
    except AmpxError:
        raise
    except Exception as error:
        low = Refusal(in_one_line(error), batch.read_before_error)
    return examined(Suspect(low, reference, setting, again))
