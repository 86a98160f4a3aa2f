"""Compare one batch in low precision with the same batch in float32, module by module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Final, TypeAlias

import numpy as np

from ampx.backend import Array
from ampx.errors import InvalidOptionError, shown
from ampx.formats import FORMATS
from ampx.policy import OptLevel

from .batch import SAMPLES, Batch, fitting_scale, plain
from .probe import Direction, Reading, Replayed, Step, Watching

# How much more than the root of the number of roundings so far an error must be, to be more than rounding.
MARGIN: Final = 8.0
WORST: Final = 10
_SHOWN: Final = 5  # names in a list


@dataclass(frozen=True)
class ModuleError:
    """How far one value of a module is from its value in float32.

    Attributes:
        module: Name of the module.
        kind: Class of the module.
        direction: `"forward"`: its output. `"backward"`: the gradient of its output.
        call: How many calls came before.
        dtype: Of the value in low precision.
        error: Norm of the difference over the norm of float32's value; infinity where only that one is finite.
        bound: What rounding explains at this place: see `bound`.
    """

    module: str
    kind: str
    direction: Direction
    call: int
    dtype: str
    error: float
    bound: float

    @property
    def parts(self) -> bool:
        """Whether the difference is more than rounding explains."""
        return self.error > self.bound


@dataclass(frozen=True)
class Comparison:
    """One batch in low precision, compared with float32; print it for the verdict and the worst modules.

    An error is the norm of the difference over the norm of float32's value. Behind *n* values rounding explains an
    error of `8 · 2^-bits · √n`, with the bits of the dtype's significand: 11 in float16, 8 in bfloat16.

    Attributes:
        dtype: The dtype that was computed in.
        simulated: The device does not compute this dtype: values were rounded to it.
        scale: What the loss was multiplied by before the backward pass.
        reference_loss: Loss in float32.
        loss: Loss in the dtype.
        gradient_error: Error of all gradients together.
        parameters: Error of each gradient, by name of its parameter.
        modules: Error of every value of every module, in order of execution.
    """

    dtype: str
    simulated: bool
    scale: float
    reference_loss: float
    loss: float
    gradient_error: float
    parameters: tuple[tuple[str, float], ...]
    modules: tuple[ModuleError, ...]

    @property
    def loss_error(self) -> float:
        """Difference of the losses over float32's loss."""
        return relative_error(np.array([self.loss]), np.array([self.reference_loss]))

    @property
    def parts_at(self) -> ModuleError | None:
        """The first value that differs by more than rounding explains; None where there is none."""
        return next((entry for entry in self.modules if entry.parts), None)

    @property
    def verdict(self) -> str:
        """Whether it is right, in one sentence."""
        how = f"simulated {self.dtype}" if self.simulated else self.dtype
        digits = f"loss {self.loss:.6g}, in float32 {self.reference_loss:.6g}; gradients differ by "
        digits += f"{self.gradient_error:.2g} of their norm"
        if not math.isfinite(self.reference_loss):
            return f"float32 itself fails on this batch (loss {self.reference_loss:g}): precision is not the cause."
        if self.parts_at is None:
            return f"{how} agrees with float32 within rounding ({digits})."
        entry = self.parts_at
        value = "output" if entry.direction == "forward" else "gradient of the output"
        amount = "is not finite" if math.isinf(entry.error) else f"is off by {entry.error:.2g} of its norm"
        name = repr(entry.module) if entry.module else "the model"
        return (
            f"{how} differs from float32, first in the {value} of {name}, which {amount}, where rounding explains "
            f"{entry.bound:.2g}; what that was computed from may have lost the precision ({digits})."
        )

    def agrees(self, tolerance: float) -> bool:
        """Return whether loss and gradients are finite and within a relative tolerance of float32's."""
        return self.loss_error <= tolerance and self.gradient_error <= tolerance

    def worst(self, direction: Direction = "forward", count: int = WORST) -> list[ModuleError]:
        """Return the modules with the largest error, each with its worst call, the largest first."""
        return worst_errors(self.modules, direction)[:count]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; numbers that are not finite are strings."""
        derived = {"loss_error": self.loss_error, "parts_at": self.parts_at, "verdict": self.verdict}
        result: dict[str, Any] = plain(
            {
                **{name: getattr(self, name) for name in self.__dataclass_fields__},
                **derived,
                "worst_outputs": self.worst("forward"),
                "worst_gradients": self.worst("backward"),
            }
        )
        return result

    def __str__(self) -> str:
        """Return the verdict and the worst modules, as text."""
        rows = [
            f"  {entry.error:10.3g}  {'output  ' if entry.direction == 'forward' else 'gradient'}  "
            f"{entry.module or '(model)'}"
            for direction in ("forward", "backward")
            for entry in self.worst(direction)
        ]
        return "\n".join([self.verdict, *rows])


def bound(dtype: str, position: int) -> float:
    """Return the relative error that rounding explains behind so many roundings of a dtype.

    A rounding moves a number by up to `2**-bits` of itself (`FORMATS`). Roundings are independent, so what adds up
    behind `n` of them grows with the root of n. `MARGIN` is for the few roundings inside a module, and for sums whose
    terms cancel a little: a network of a hundred modules that is sound stays below it; a module that loses most of its
    digits does not.

    Args:
        dtype: A name of `FORMATS`.
        position: How many values of modules came before.
    """
    return MARGIN * 2.0 ** -FORMATS[dtype].bits * math.sqrt(position + 1)


def check_tolerance(tolerance: object) -> None:
    """Raise unless a tolerance is None or a positive number.

    Raises:
        InvalidOptionError: It is neither.
    """
    if tolerance is not None and not (isinstance(tolerance, Real) and float(tolerance) > 0):
        raise InvalidOptionError(
            f"tolerance={shown(tolerance)} is no tolerance; accepted: a positive number, or None for what rounding "
            f"explains. Pass 0.01 for 1 %."
        )


def relative_error(value: Array, reference: Array) -> float:
    """Return the norm of the difference over the norm of the reference.

    It is infinite where only the reference is finite, 0 where the reference is not finite, and 1 where the reference is
    zero and the value is not.
    """
    exact, other = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    if not np.isfinite(exact).all():
        return 0.0
    if not np.isfinite(other).all():
        return math.inf
    distance, norm = float(np.linalg.norm(other - exact)), float(np.linalg.norm(exact))
    return 0.0 if distance == 0 else distance / norm if norm else 1.0


# Module, operation, direction and call: they identify a value in a run, and find it in another run.
Key: TypeAlias = tuple[str, str, Direction, int]


def key_of(reading: Reading) -> Key:
    """Return the key of a value."""
    return reading.module, reading.operation, reading.direction, reading.call


def by_key(readings: Iterable[Reading]) -> dict[Key, Reading]:
    """Return the values of a run by their keys."""
    return {key_of(entry): entry for entry in readings}


def unscaled(readings: Sequence[Reading], scale: float, exact: Sequence[Reading] = ()) -> list[Reading]:
    """Return readings whose gradients are divided by the loss scale, in float32; their statistics stay as they are.

    A gradient that is part of a loss, as of a penalty, carries no loss scale, and nothing in a reading says so. Where
    it is nearer to float32's as it is, it is not divided: no rounding makes a gradient so many times larger.

    Args:
        readings: In low precision.
        scale: The loss scale.
        exact: The same in float32, unscaled, as far as they are known.
    """
    others = by_key(exact)
    return [_unscaled(entry, scale, others.get(key_of(entry))) for entry in readings]


def _unscaled(entry: Reading, scale: float, other: Reading | None) -> Reading:
    if entry.sample is None or not carries_scale(entry, scale, other):
        return entry
    return replace(entry, sample=entry.sample / np.float32(scale))


def carries_scale(entry: Reading, scale: float, other: Reading | None) -> bool:
    """Return whether a value is a gradient that carries the loss scale, as far as is known: see `unscaled`."""
    if entry.direction == "forward" or entry.sample is None:
        return entry.direction == "backward"
    divided = replace(entry, sample=entry.sample / np.float32(scale))
    return error_of(entry, other) >= error_of(divided, other)


def error_of(entry: Reading, other: Reading | None) -> float:
    """Return the relative error of a value; 0 where there is nothing to compare it with."""
    if other is None or entry.sample is None or other.sample is None or entry.sample.shape != other.sample.shape:
        return 0.0
    return relative_error(entry.sample, other.sample)


def padded(shapes: Iterable[tuple[str, Sequence[int]]], dtype: str) -> str | None:
    """Return a sentence that names the parameters whose dimensions matrix units pad; None where they pad none.

    Args:
        shapes: Of each parameter its name and its shape.
        dtype: The low precision.
    """
    multiple = 16 if FORMATS[dtype].bits < 8 else 8
    odd = [
        f"{name} ({'x'.join(map(str, shape))})"
        for name, shape in shapes
        if len(shape) >= 2 and any(size % multiple for size in sorted(shape)[-2:])
    ]
    if not odd:
        return None
    named = listed_names(odd)
    return f"Dimensions of {named} are no multiples of {multiple}: matrix units of accelerators pad them."


def listed_names(names: Sequence[str]) -> str:
    """Return the first of some names, and how many there are besides."""
    rest = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def module_errors(reference: Sequence[Reading], low: Sequence[Reading], dtype: str) -> tuple[ModuleError, ...]:
    """Compare the values of modules, in order of execution.

    Args:
        reference: Readings in float32, with samples.
        low: Readings of the same batch in low precision, with samples.
        dtype: The low precision.
    """
    exact = {(entry.module, entry.direction, entry.call): entry for entry in reference if not entry.operation}
    errors: list[ModuleError] = []
    for entry in low:
        other = exact.get((entry.module, entry.direction, entry.call))
        if entry.operation or other is None or entry.sample is None or other.sample is None:
            continue
        if entry.sample.shape != other.sample.shape:
            continue
        broken = entry.value.nonfinite and not other.value.nonfinite  # perhaps beside the sample
        error = math.inf if broken else relative_error(entry.sample, other.sample)
        limit = bound(dtype, len(errors))
        errors.append(ModuleError(entry.module, entry.kind, entry.direction, entry.call, entry.dtype, error, limit))
    return tuple(errors)


def worst_errors(errors: Iterable[ModuleError], direction: Direction) -> list[ModuleError]:
    """Return each module's worst call, the largest error first."""
    largest: dict[str, ModuleError] = {}
    for entry in sorted(errors, key=lambda entry: -entry.error):
        if entry.direction == direction:
            largest.setdefault(entry.module, entry)
    return list(largest.values())


def error_map(errors: Mapping[int, Sequence[ModuleError]]) -> dict[str, Any] | None:
    """Return how far outputs are from float32's, by module in order of execution and by step; None without any.

    Args:
        errors: By step.
    """
    columns = {
        step: {entry.module: entry.error for entry in worst_errors(entries, "forward")}
        for step, entries in errors.items()
    }
    steps = [step for step, column in columns.items() if column]
    modules = [entry.module for entries in errors.values() for entry in entries if entry.direction == "forward"]
    if not steps:
        return None
    rows = list(dict.fromkeys(modules))
    values = [[columns[step].get(module) for step in steps] for module in rows]
    return {"modules": rows, "steps": steps, "errors": plain(values)}


def gradient_errors(low: Replayed, reference: Replayed) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Return the error of all gradients together, and that of each parameter's."""
    each: list[tuple[str, float]] = []
    squares = norms = 0.0
    for name, exact in reference.gradients.items():
        other = low.gradients.get(name, np.zeros_like(exact))
        error = relative_error(other, exact)
        each.append((name, error))
        norm = float(np.linalg.norm(np.asarray(exact, np.float64)))
        if math.isfinite(norm):
            norms += norm**2
            squares += (
                math.inf
                if math.isinf(error)
                else float(np.linalg.norm(np.asarray(other, np.float64) - np.asarray(exact, np.float64)) ** 2)
            )
    whole = 0.0 if squares == 0 else math.sqrt(squares / norms) if norms else 1.0
    return whole, tuple(each)


def compared(
    reference: tuple[Replayed, Sequence[Reading]],
    low: tuple[Replayed, Sequence[Reading]],
    dtype: str,
    scale: float = 1.0,
    simulated: bool = False,
) -> Comparison:
    """Compare two replays of one batch.

    Args:
        reference: The replay in float32, and what was read in it, with samples.
        low: The same in low precision.
        dtype: The low precision, of `FORMATS`.
        scale: The loss scale that it was replayed with.
        simulated: Values were rounded to the dtype, which the device does not compute.
    """
    whole, each = gradient_errors(low[0], reference[0])
    return Comparison(
        dtype,
        simulated,
        scale,
        reference[0].loss,
        low[0].loss,
        whole,
        each,
        module_errors(reference[1], unscaled(low[1], scale, reference[1]), dtype),
    )


def compare(
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
    samples: int = SAMPLES,
) -> Comparison:
    """Compute one batch in float32 and in low precision, and compare loss, gradients and every module.

    Nothing is stepped: weights, buffers, gradients and random state stay as they are.

    Args:
        step: A function that takes the model and returns the loss of one batch, without a backward.
        model: The model; its parameters where these are a value (JAX).
        dtype: The low precision; by default the session's, or what the device prefers. One that the device does not
            compute is simulated where the backend can: values are rounded to it.
        framework: Name of the framework; by default that of the only session, or the only one imported.
        device: Name of the device; by default the session's, or the best.
        level: `"O1"`, or `"O0"`, which compares float32 with itself.
        allow: As in `init`; `"module:pattern"` names modules.
        deny: As in `init`; `"module:pattern"` names modules.
        loss_scale: What the loss is multiplied by before the backward; by default the largest, up to 65536, whose
            gradients the dtype can hold, and 1 for dtypes with the exponents of float32.
        samples: Compare up to so many elements of every module's value.

    Returns:
        The comparison; print it for the verdict and the worst modules.

    Raises:
        UnsupportedDtypeError: The device neither computes nor simulates the dtype.
        UnsupportedByBackendError: The backend does not watch or does not replay.

    Sync: many.

    Example:
        >>> print(ampx.compare(lambda model: loss_fn(model(x), y), model, dtype="bfloat16"))
    """
    batch = Batch(step, model, framework, device)
    chosen = batch.dtype(dtype)
    casting = batch.casting(chosen, level, allow, deny)
    watching = Watching(dtype=chosen, samples=samples)
    reference = batch.run(watching=watching)
    scale = fitting_scale(chosen, reference) if loss_scale is None else loss_scale
    low = batch.run(casting, scale, watching)
    return compared(
        (reference.replayed, reference.readings), (low.replayed, low.readings), chosen, scale, casting.simulated
    )
