"""`ampx.convert`: a trained model in low precision for inference, compared with float32 before it is handed over."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ampx import callers
from ampx.backend import Array, Backend, offer
from ampx.errors import (
    AmbiguousFrameworkError,
    AmpxError,
    ConversionError,
    InvalidOptionError,
    PrecisionWarning,
    UnsupportedDtypeError,
    shown,
)
from ampx.numerics.compare import bound, check_tolerance, relative_error
from ampx.numerics.tolerance import LARGEST_TOLERANCE
from ampx.numerics.tune_search import minimal
from ampx.plugins import default_registry
from ampx.policy import Dtype, normalise_dtype
from ampx.session import listed, sessions

from .converter import Conversion, Converter


@dataclass(frozen=True)
class OutputError:
    """How far an output is from float32's.

    Attributes:
        batch: Position of the batch.
        output: Place in what the model returns, such as `"output['logits']"`.
        error: Norm of the difference over the norm of the float32 output, where that is finite; infinite where one is
            finite and the other is not, or shapes differ. Of integers: the share that differs.
    """

    batch: int
    output: str
    error: float

    def agrees(self, tolerance: float) -> bool:
        """Return whether it is within a tolerance; no tolerance is wide enough for infinity."""
        return self.error <= tolerance and math.isfinite(self.error)


def convert(
    model: Any,
    dtype: object = "float16",
    *,
    batches: Iterable[Any] = (),
    deny: Iterable[Any] = (),
    keep_io: bool = True,
    tolerance: float | None = None,
    framework: str | None = None,
) -> Any:
    """Return a copy of a trained float32 model for inference in low precision, if it agrees with float32.

    By the framework's own converter where it has one (MXNet), else by storing weights in low precision and computing
    in it; normalization and what is denied stay in float32. The copy is in inference mode. Neither the model nor a
    session of ampx is changed, and no session is needed.

    Args:
        model: A model of the framework, on the device that is to compute the comparison; in JAX a pair of a function
            and its parameters, of which the function is called with the parameters and a batch.
        dtype: `"float16"` or `"bfloat16"`, of weights and computation.
        batches: What the model is called with, to compare outputs with float32: of each, a tuple holds positional
            arguments, a dict named ones, and all else is the only argument. Without any nothing is compared, and a
            warning says so; JAX, MXNet and Paddle need one to trace the model.
        deny: What stays in float32: `"module:pattern"` for names of modules, as in `init`, and what else the
            backend takes.
        keep_io: Floating inputs and outputs are float32, as before; False: outputs are of the low dtype, and inputs
            may be.
        tolerance: How far an output may be from float32's, relative to its norm; by default what rounding explains
            in a model of so many modules, and at most a quarter.
        framework: Name of the framework; by default the one that the model is of.

    Returns:
        The converted model, of the same kind as the model (in MXNet a `SymbolBlock`).

    Raises:
        ConversionError: The framework cannot convert or run it, or an output is further off than the tolerance. The
            message names the worst output and a smallest set of modules with which, in float32, all outputs agree.
        InvalidOptionError: `tolerance`, `keep_io` or `batches` has a value that is not accepted, or the model is not
            one that can be converted.
        UnsupportedDtypeError: The dtype is neither float16 nor bfloat16, or the model's device does not compute it.
        UnsupportedOpError: An entry of `deny` matches nothing.
        UnsupportedByBackendError: The backend converts no models.

    Sync: many.

    Example:
        >>> small = ampx.convert(model, "bfloat16", batches=[x])
    """
    wanted = _low(dtype)
    check_tolerance(tolerance)
    if keep_io is not True and keep_io is not False:
        raise InvalidOptionError(f"keep_io={shown(keep_io)} is no choice; accepted: True, False. Pass one of these.")
    entries, examples = listed("deny", deny), _examples(batches)
    backend = default_registry().load(framework or _framework_of(model))
    converter = offer(backend, Converter)
    conversion = Conversion(wanted, entries, keep_io, examples[0] if examples else None)
    with _casting_off(backend):
        converted = converter.convert(model, conversion)
        if not examples:
            callers.warn(
                "convert got no batches: what the converted model returns was not compared with float32. Pass "
                "batches=[…], some of what the model is called with.",
                PrecisionWarning,
            )
            return converted.model
        trial = _Trial(converter, model, conversion, examples)
        explained = min(LARGEST_TOLERANCE, bound(wanted, len(converted.modules)))
        limit = explained if tolerance is None else float(tolerance)
        failure: ConversionError | None = None
        try:
            worst = max(trial.errors(converted.model), key=lambda entry: entry.error)
        except ConversionError as error:
            failure = error
        else:
            if worst.agrees(limit):
                return converted.model
        needed = minimal(converted.modules, lambda names: bool(names) and trial.agrees(names, limit))
    if failure is not None:
        raise ConversionError(f"{failure} {_advice(needed, wanted, entries)}") from failure.__cause__
    off = "not finite as in float32" if math.isinf(worst.error) else f"off by {worst.error:.2g} of its norm in float32"
    why = "what rounding explains" if tolerance is None else "as asked for"
    raise ConversionError(
        f"in {wanted}, {worst.output} of batch {worst.batch} is {off}; accepted: up to {limit:.2g}, {why}. "
        f"{_advice(needed, wanted, entries)}"
    )


class _Trial:
    """What a model returns in float32, and conversions that are held against it."""

    def __init__(self, converter: Converter, model: Any, conversion: Conversion, batches: Sequence[Any]) -> None:
        self.converter, self.model, self.conversion, self.batches = converter, model, conversion, batches
        # A copy, so that calling it in inference mode changes nothing of the model.
        reference = converter.convert(model, replace(conversion, dtype="float32", deny=(), keep_io=True)).model
        self.references = [converter.infer(reference, batch) for batch in batches]
        if not any(self.references):
            raise InvalidOptionError(
                f"the model returned no tensor for {len(batches)} batches, so that there is nothing to compare; "
                f"accepted: models that return tensors, in tuples, lists, dicts or dataclasses. Return the outputs."
            )

    def errors(self, model: Any) -> Iterator[OutputError]:
        """Compare the outputs of a converted model with float32's.

        Raises:
            ConversionError: It does not run.
        """
        for number, (batch, reference) in enumerate(zip(self.batches, self.references, strict=True)):
            try:
                outputs = self.converter.infer(model, batch)
            except AmpxError:
                raise
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                raise ConversionError(
                    f"the model does not run in {self.conversion.dtype}, on batch {number}: {type(error).__name__}: "
                    f"{lines[0]}; accepted: models whose operations compute in it or in mixed dtypes."
                ) from error
            yield from compared(outputs, reference, number)

    def agrees(self, names: Iterable[str], limit: float) -> bool:
        """Return whether all outputs agree where these modules, too, stay in float32."""
        deny = (*self.conversion.deny, *map(_entry, names))
        try:
            converted = self.converter.convert(self.model, replace(self.conversion, deny=deny))
            return all(entry.agrees(limit) for entry in self.errors(converted.model))
        except ConversionError:
            return False


def compared(outputs: Mapping[str, Array], reference: Mapping[str, Array], batch: int = 0) -> list[OutputError]:
    """Return how far outputs are from float32's."""
    names = dict.fromkeys((*reference, *outputs))
    return [OutputError(batch, name, _error(outputs.get(name), reference.get(name))) for name in names]


def _error(value: Array | None, reference: Array | None) -> float:
    import numpy as np

    if value is None or reference is None or value.shape != reference.shape:
        return math.inf
    if not np.issubdtype(reference.dtype, np.floating):
        return float(np.mean(value != reference)) if reference.size else 0.0
    finite = np.isfinite(reference)
    if not np.array_equal(value[~finite], reference[~finite], equal_nan=True):
        return math.inf
    return relative_error(value[finite], reference[finite])


def _advice(needed: frozenset[str] | None, dtype: str, deny: Sequence[Any]) -> str:
    if needed is None:
        return (
            f"No set of modules in float32 helps: is it computed outside of modules, or not deterministic? Convert to "
            f"{'bfloat16' if dtype == 'float16' else 'float16'}, pass a larger tolerance, or leave it in float32."
        )
    entries = [*deny, *map(_entry, sorted(needed))]
    return (
        f"Keep in float32 what needs it, by deny={entries!r}, with which all outputs agree, or pass a larger tolerance."
    )


def _entry(name: str) -> str:
    return f"module:{glob.escape(name)}"


def _low(dtype: object) -> Dtype:
    wanted = normalise_dtype(dtype)
    if wanted == "float32":
        raise UnsupportedDtypeError(
            "dtype='float32' is what the model has; accepted: 'float16', 'bfloat16'. Pass one of these."
        )
    return wanted


def _examples(batches: Iterable[Any]) -> list[Any]:
    if (isinstance(batches, (str, dict, tuple)) and len(batches)) or not isinstance(batches, Iterable):
        raise InvalidOptionError(
            f"batches is a {type(batches).__name__}, which may be one batch; accepted: a list of batches, or another "
            f"iterable that is no tuple or dict. Pass batches=[batch]."
        )
    return list(batches)


def _framework_of(model: Any) -> str:
    """Return the registered framework that a model is of, importing nothing."""
    registry = default_registry()
    names = _owners(model, {name: frozenset(registry.registration(name).roots) for name in registry.names()})
    if len(names) == 1:
        return next(iter(names))
    if not names:
        active = sessions.all_sessions()
        return active[0].framework if len(active) == 1 else registry.guess()
    raise AmbiguousFrameworkError(
        f"convert got {type(model).__name__}, which may be of {' or '.join(sorted(names))}; accepted: one framework. "
        f"Name it by framework=…."
    )


def _owners(item: Any, roots: Mapping[str, frozenset[str]]) -> set[str]:
    modules = {base.__module__.partition(".")[0] for base in type(item).__mro__}
    owners = {name for name, own in roots.items() if own & modules}
    if not owners and isinstance(item, (tuple, list, dict)):
        for value in item.values() if isinstance(item, dict) else item:
            owners = _owners(value, roots)
            if owners:
                break
    return owners


@contextmanager
def _casting_off(backend: Backend) -> Iterator[None]:
    session = sessions.get(backend.name)
    if session is None or session.plan is None:
        yield
        return
    with backend.autocast(session.plan, False):
        yield
