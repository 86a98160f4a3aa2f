"""Gradients of a raw trainer: which there are, whether all are finite, and how they are unscaled and clipped."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ampx.backend import Array
from ampx.formats import stride
from ampx.protocol import NotCopied
from ampx.rooms import METER_SAMPLES

from .compat import mx
from .dtypes import name_of

if TYPE_CHECKING:
    from ampx.numerics.host_meter import Sampled

# The originals: what `amp.init` makes of the first two looks at every gradient's dtype, and of the last one casts.
_multi_all_finite: Final = mx.nd.multi_all_finite
_all_finite: Final = mx.nd.all_finite
_dot: Final = mx.nd.dot
_read_fresh: Final = mx.base._LIB.MXNDArrayGetGradState

# As many as MXNet's own scaler gives its kernel in one call.
CHUNK: Final = 200
# A call takes as long as this many elements of the largest array do in a call for many on the CPU.
CALL: Final = 250
# The kernel takes one dtype a call, and not bfloat16.
_CHECKED: Final = frozenset({"float16", "float32", "float64"})
# As many squares as one call adds up in float32, which is exact to 4e-6 then.
_SQUARED: Final = 2**20
# By so much at once are gradients shrunk: the factor itself would leave float32's range.
_SMALLEST_FACTOR: Final = 2.0**-64


class Batch(list[Any]):
    """Gradients of one dtype on one context, the largest first.

    Native defects, both on the CPU: `multi_all_finite` copies its table of 200 arrays once for every element of the
    largest one, and takes 60 times as long for a large array as `all_finite`; `multi_sum_sq` adds up an array's squares
    one by one in float32, which loses 0.4 % of 4 million elements and can lose all beyond 2**24.

    Attributes:
        alone: How many of the first ones are too large for such calls; 0 on other devices.
    """

    alone: int

    def __init__(self, gradients: Sequence[Any], sizes: Sequence[int]) -> None:
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        super().__init__(_classic([gradients[place] for place in order]))
        on_cpu = self[0].context.device_type != "gpu"
        self.alone = _count_alone([sizes[place] for place in order]) if on_cpu else 0


def _count_alone(sizes: Sequence[int]) -> int:
    """Return how many of the largest arrays to leave out of calls for many, so that all calls take the least time."""
    costs = [CALL * count + sum(CALL + largest for largest in sizes[count::CHUNK]) for count in range(len(sizes) + 1)]
    return costs.index(min(costs))


# Gradients by context, and in each by dtype; sparse ones apart, as "row_sparse".
Batches: TypeAlias = list[dict[str, Batch]]
# Arrays and their sizes, of what becomes a batch.
_Listed: TypeAlias = tuple[list[Any], list[int]]


def parameters(trainer: Any) -> Iterator[Any]:
    """Return the parameters that have gradients; one gradient a context."""
    return (parameter for parameter in trainer._params if parameter._grad is not None)


def adding(trainer: Any) -> list[Any]:
    """List the parameters to whose gradients a backward adds."""
    return [parameter for parameter in trainer._params if parameter._grad_req == "add" and parameter._grad is not None]


def any_fresh(trainer: Any) -> bool:
    """Return whether a backward wrote a gradient since the last step."""
    # Every step asks: for all parameters before its backward, and after that until the first yes. So it asks MXNet's
    # library itself, as an array's `_fresh_grad` does with three calls of Python.
    flag = ctypes.c_int()
    place = ctypes.byref(flag)
    for parameter in trainer._params:
        if parameter._grad is not None:
            for data in parameter._data:
                _read_fresh(data.handle, place)
                if flag.value:
                    return True
    return False


def is_fresh(parameter: Any) -> bool:
    """Return whether a backward wrote a parameter's gradient, on any context, since the last step."""
    return parameter._grad is not None and any(data._fresh_grad for data in parameter._data)


def mark_stale(trainer: Any, kept: Iterable[Any] = ()) -> None:
    """Forget that gradients were written, but for some parameters."""
    names = {parameter.name for parameter in kept}
    for parameter in parameters(trainer):
        if parameter.name not in names:
            for data in parameter._data:
                data._fresh_grad = False


def any_nonzero(parameters: Iterable[Any]) -> bool:
    """Return whether the gradients of some parameters are more than zeros. Sync: one a gradient, until one is found."""
    with mx.autograd.pause():
        return any(
            bool((gradient.astype("float32") != 0).sum().asscalar())
            for parameter in parameters
            for gradient in _classic(parameter._grad)
            if gradient.stype == "default"
        )


def restore_fresh(trainer: Any, message: str) -> None:
    """Undo what MXNet's update did before it met a stale gradient and raised a message that names the parameter.

    Native defect: it had marked the gradients of the parameters before that one as used, so that a second try would
    leave these parameters alone.
    """
    for parameter in parameters(trainer):
        if f"`{parameter.name}`" in message:
            return
        for data in parameter._data:
            data._fresh_grad = True


def rescale(parameters: Iterable[Any], factor: float, only_stale: bool = False) -> None:
    """Multiply the gradients of some parameters in place; `only_stale`: not those written since the last step."""
    with mx.autograd.pause():
        for parameter in parameters:
            for data, gradient in zip(parameter._data, parameter._grad, strict=True):
                if not (only_stale and data._fresh_grad):
                    mx.nd._internal._mul_scalar(gradient, scalar=factor, out=gradient)


def clear(trainer: Any) -> None:
    """Set gradients to zero, and forget that they were written."""
    for parameter in parameters(trainer):
        parameter.zero_grad()
    mark_stale(trainer)


def collect(trainer: Any, only_fresh: bool) -> Batches:
    """List the gradients, or only those that a backward wrote since the last step."""
    result: list[dict[str, _Listed]] = []
    last: Any = None
    targets: list[_Listed] = []
    for parameter in trainer._params:
        gradients = parameter._grad
        if gradients is None:
            continue
        kind = parameter._dtype, parameter._grad_stype
        if kind != last:  # most are the same, and naming a dtype is slow
            last = kind
            targets = _targets(result, parameter, len(gradients))
        size = math.prod(parameter._shape)
        for (arrays, sizes), gradient, data in zip(targets, gradients, parameter._data, strict=True):
            if not only_fresh or data._fresh_grad:
                arrays.append(gradient)
                sizes.append(size)
    return [{kind: Batch(arrays, sizes) for kind, (arrays, sizes) in batches.items() if arrays} for batches in result]


class Layout(NotCopied):
    """What `collect` gave of all gradients, for as long as they are the same arrays: most steps ask for the same."""

    __slots__ = ("_batches", "_gradients")

    def __init__(self) -> None:
        self._gradients: list[list[Any]] = []
        self._batches: Batches = []

    def collect(self, trainer: Any) -> Batches:
        """List all gradients, as `collect` does."""
        gradients = [parameter._grad for parameter in trainer._params if parameter._grad is not None]
        before = self._gradients
        if len(before) != len(gradients) or not all(map(operator.is_, before, gradients)):
            self._batches = collect(trainer, False)
            self._gradients = gradients
        return self._batches


def _targets(result: list[dict[str, _Listed]], parameter: Any, contexts: int) -> list[_Listed]:
    """Return the lists, two a context, in which gradients like a parameter's and their sizes belong."""
    kind = name_of(parameter._dtype) if parameter._grad_stype == "default" else "row_sparse"
    result.extend({} for _ in range(contexts - len(result)))
    return [batches.setdefault(kind, ([], [])) for batches in result]


def _classic(batch: list[Any]) -> list[Any]:
    """Return MXNet's NumPy arrays, which its kernels refuse, as its classic ones; they share their memory."""
    return [gradient.as_nd_ndarray() for gradient in batch] if isinstance(batch[0], mx.np.ndarray) else batch


def all_finite(gradients: Batches) -> Any:
    """Return one float32 element on the first context, by MXNet's own kernels: 1 where all are finite, else 0."""
    flags: list[Any] = []
    with mx.autograd.pause():
        for batches in gradients:
            if not batches:
                continue
            # The first call makes the flag and writes the 1 into it; MXNet's own scaler spends another call on that.
            flag = None
            for kind, batch in batches.items():
                dense = batch if kind in _CHECKED else [_testable(kind, gradient) for gradient in batch]
                for gradient in dense[: batch.alone]:
                    flag = _all_finite(gradient, init_output=flag is None, out=flag)
                for start in range(batch.alone, len(dense), CHUNK):
                    chunk = dense[start : start + CHUNK]
                    flag = _multi_all_finite(*chunk, num_arrays=len(chunk), init_output=flag is None, out=flag)
            flags.append(flag)
        return combine(flags)


def combine(flags: Sequence[Any]) -> Any:
    """Return 1 where all of some flags are, else 0: one float32 element on the first one's context."""
    result = flags[0]
    for other in flags[1:]:
        result = result * other.as_in_context(result.context)
    return result


def unscale(gradients: Batches, scale: float) -> Any:
    """Divide gradients by their scale in place, and return `all_finite` of the results: they may overflow."""
    with mx.autograd.pause():
        for batches in gradients:
            for batch in batches.values():
                for gradient in batch:
                    mx.nd._internal._div_scalar(gradient, scalar=scale, out=gradient)
    return all_finite(gradients)


def _testable(kind: str, gradient: Any) -> Any:
    if kind == "row_sparse":
        return mx.nd.cast_storage(gradient, "default")
    return gradient.astype("float32")


def clip(
    gradients: Batches, max_norm: float | None, max_value: float | None, finite: Any = None
) -> tuple[bool, float | None]:
    """Clip finite gradients in place by value, then by global L2 norm; return whether they are, and the norm.

    Every context is clipped by the norm of its own gradients, and the first one's is returned: where the trainer
    reduces them, all contexts hold the same; where it does not, every context trains a model of its own. `finite`
    is one float32 element, not 0 where all gradients are finite; None where they are known to be. Others stay as
    they are.

    Sync: one; where finite gradients have a norm beyond float32, and for sparse ones, some more.
    """
    with mx.autograd.pause():
        sums = [] if max_norm is None else [_sum_of_squares(batches, max_value) for batches in gradients if batches]
        flags = [] if finite is None else [finite]
        numbers = _read([*flags, *sums])
        if flags and not numbers[0]:
            return False, math.sqrt(numbers[1]) if sums else None
        if max_value is not None:
            _clip_values(gradients, max_value)
        return True, None if max_norm is None else _clip_norms(gradients, numbers[len(flags) :], max_norm)


def _clip_values(gradients: Batches, bound: float) -> None:
    for gradient in (gradient for batches in gradients for batch in batches.values() for gradient in batch):
        mx.nd.clip(gradient, -bound, bound, out=gradient)


def _clip_norms(gradients: Batches, sums: list[float], max_norm: float) -> float:
    """Clip the gradients of each context by their norm, of which the sums of squares are read; return the first."""
    norms = []
    for batches, squares in zip(filter(None, gradients), sums, strict=True):
        norm = math.sqrt(squares if math.isfinite(squares) else _wide_sum_of_squares(batches))
        norms.append(norm)
        if max_norm < norm < math.inf:  # else such gradients stay bit for bit
            _shrink(batches, max_norm / norm)
    return norms[0] if norms else 0.0


def _read(scalars: list[Any]) -> list[float]:
    """Read arrays of one element, on whatever contexts, with one sync."""
    if not scalars:
        return []
    first = scalars[0].context
    moved = [scalar.as_in_context(first).astype("float32").reshape((1,)) for scalar in scalars]
    numbers: list[float] = mx.nd.concat(*moved, dim=0).asnumpy().astype("float64").tolist()
    return numbers


def _shrink(batches: dict[str, Batch], factor: float) -> None:
    """Multiply gradients by a factor below 1, however small."""
    while factor < _SMALLEST_FACTOR:
        _shrink(batches, _SMALLEST_FACTOR)
        factor /= _SMALLEST_FACTOR
    for batch in batches.values():
        for gradient in batch:
            mx.nd._internal._mul_scalar(gradient, scalar=factor, out=gradient)


def _sum_of_squares(batches: dict[str, Batch], max_value: float | None) -> Any:
    """Return the sum of squares as clipped by value, a float32 array of one element; inf where float32 overflows."""
    sums: list[Any] = []
    for kind, batch in batches.items():
        values = batch if max_value is None else [mx.nd.clip(gradient, -max_value, max_value) for gradient in batch]
        if kind == "row_sparse":
            sums.extend(mx.nd.norm(value).square().reshape((1,)).astype("float32") for value in values)
        elif kind == "float32":
            sums.extend(square for value in values[: batch.alone] for square in _squares(value))
            for start in range(batch.alone, len(values), CHUNK):
                chunk = values[start : start + CHUNK]
                sums.append(mx.nd.multi_sum_sq(*chunk, num_arrays=len(chunk)).sum())
        else:
            sums.extend(square for value in values for square in _squares(value.astype("float32")))
    return mx.nd.add_n(*sums)


def _squares(values: Any) -> Iterator[Any]:
    """Return a float32 array's sums of squares, each an array of one element."""
    flat = values.reshape((-1,))
    parts = (flat[start : start + _SQUARED] for start in range(0, flat.shape[0], _SQUARED))
    return (_dot(part, part) for part in parts)


def _wide_sum_of_squares(batches: dict[str, Batch]) -> float:
    """Return the sum of squares in float64, which no float32 elements overflow. Sync: one a gradient."""
    values = [
        gradient.data if kind == "row_sparse" else gradient for kind, batch in batches.items() for gradient in batch
    ]
    return math.fsum(value.astype("float64").square().sum().asscalar() for value in values if value.size)


def name_nonfinite(trainer: Any, model: Any | None) -> list[tuple[str, int, int]]:
    """List (name, non-finite elements, elements) of parameters with non-finite gradients; the worst context counts.

    The names are those in the model, or the parameters' own. Sync: one a gradient.
    """
    named = {} if model is None else model._collect_params_with_prefix()
    names = {id(parameter): name for name, parameter in named.items()}
    result = []
    for parameter in parameters(trainer):
        bad = max(map(_count_nonfinite, parameter._grad))
        if bad:
            result.append((names.get(id(parameter), parameter.name), bad, int(parameter._data[0].size)))
    return result


def _count_nonfinite(gradient: Any) -> int:
    values = gradient.data if gradient.stype == "row_sparse" else gradient.as_nd_ndarray()
    if not values.size:
        return 0
    with mx.autograd.pause():
        return int(values.size - mx.nd.contrib.isfinite(values.astype("float32")).sum().asscalar())


def meter_samples(trainer: Any, gradients: bool) -> list[Sampled]:
    """Sample parameters, or their masters, and dense gradients, of the first context. Sync: one for each of them.

    Those in low precision are left out where MXNet updates float32 copies of its own.
    """
    from ampx.numerics.host_meter import Sampled  # it may have been taken out; nothing is metered then

    copied = getattr(trainer._optimizer, "multi_precision", False)
    sampled = []
    with mx.autograd.pause():
        for parameter in parameters(trainer):
            masters = getattr(parameter, "ampx_masters", None)
            values, gradient = (masters or parameter._data)[0], parameter._grad[0]
            dtype = name_of(values.dtype)
            if not (copied and dtype in ("float16", "bfloat16")):
                slopes = _sample(gradient) if gradients and gradient.stype == "default" else None
                sampled.append(Sampled(parameter.name, dtype, _sample(values), slopes))
    return sampled


def sample(
    trainer: Any, samples: int, names: Mapping[int, str]
) -> list[tuple[str, tuple[int, ...], Array, Array | None]]:
    """Return name, shape and samples, on the first context, of parameters with dense gradients, as they are now.

    These are of the gradient, and of the parameter, None where it is not float32.

    Args:
        trainer: The trainer.
        samples: So many elements at most.
        names: The names of parameters by id.

    Sync: two for each of them.
    """
    with mx.autograd.pause():
        return [
            (names[id(parameter)], tuple(parameter.shape), _sample(gradient, samples), _weights(data, samples))
            for parameter in parameters(trainer)
            for gradient, data in zip(parameter._grad[:1], parameter._data[:1], strict=True)
        ]


def _weights(data: Any, samples: int) -> Any:
    return _sample(data, samples) if data.stype == "default" and name_of(data.dtype) == "float32" else None


def _sample(tensor: Any, samples: int = METER_SAMPLES) -> Any:
    """Return elements as float32; few elements come as they are, because four calls take longer than they do."""
    values = _classic([tensor])[0]
    if values.size > samples:
        values = values.reshape((-1,))[:: stride(values.size, samples)]
    if name_of(values.dtype) != "float32":
        values = values.astype("float32")
    return values.asnumpy().reshape(-1)
