"""Gradients of an optimizer: collect, unscale and check, clip."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import paddle

from ampx import modules
from ampx.backend import Array
from ampx.errors import UnsupportedByBackendError
from ampx.formats import stride
from ampx.rooms import METER_SAMPLES
from ampx.scale_state import FLOAT32_MAX, FLOAT32_TINY

if TYPE_CHECKING:
    from ampx.numerics.host_meter import Sampled

# By so much at once are gradients shrunk: the factor itself would leave float32's range.
_SMALLEST_FACTOR: Final = 2.0**-64


def parameters(optimizer: Any) -> list[paddle.Tensor]:
    """List the trainable parameters of a raw optimizer, in order."""
    flat = optimizer._param_groups or []
    if flat and isinstance(flat[0], dict):
        flat = [parameter for group in flat for parameter in group["params"]]
    return [parameter for parameter in flat if not parameter.stop_gradient]


def collect(optimizer: Any) -> list[paddle.Tensor]:
    """List the parameters that have a gradient; `gradient_of` returns it."""
    return with_gradients(parameters(optimizer))


def with_gradients(listed: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    """List those of some parameters that have a gradient."""
    pairs = zip(listed, gradients_of(listed), strict=True)
    return [parameter for parameter, gradient in pairs if gradient is not None]


def gradient_of(parameter: paddle.Tensor) -> Any:
    """Return the gradient tensor that Paddle's optimizers would apply; None without."""
    return gradients_of((parameter,))[0]


def gradients_of(listed: Sequence[paddle.Tensor]) -> list[Any]:
    """List the gradient tensors of parameters, each as `gradient_of` returns it: a call for each would be dear."""
    # `main_grad` is the float32 gradient of a low-precision parameter.
    return [
        parameter._grad_ivar() if (main := getattr(parameter, "main_grad", None)) is None else main
        for parameter in listed
    ]


def any_nonzero(owners: Sequence[paddle.Tensor]) -> bool:
    """Return whether a gradient is more than the zeros that `clear_grad` leaves behind. Sync: one a gradient."""
    return any(bool(_values(parameter).astype("bool").any()) for parameter in owners)


def unscale(owners: Sequence[paddle.Tensor], scale: float) -> Finding:
    """Divide gradients by the scale in place and test them, with Paddle's own kernel, in one call a dtype.

    After an overflow Paddle's kernel leaves zeros and NaN where the gradients were. Gradients may be dense or sparse.
    No operation here has a backward, so that none is recorded.
    """
    batches: dict[Any, list[paddle.Tensor]] = {}
    last: Any = None
    for parameter, values in zip(owners, gradients_of(owners), strict=True):
        if not values.is_dense():
            # Native defect: on the CPU the kernel kills the process when it meets sparse rows. It gets their values.
            values = _values(parameter)
        dtype = values.dtype
        if dtype is not last:  # most are the same, and looking one up is slow
            batch, last = batches.setdefault(dtype, []), dtype
        batch.append(values)
    overflows = []
    for dtype, batch in batches.items():
        overflows.append(_unscale_dense(batch, dtype, scale))
        if scale < 1.0:
            # Paddle's kernel tests before it divides, and dividing by less than one may overflow.
            overflows.extend(paddle.isfinite(values).all().logical_not().reshape([1]) for values in batch)
    return Finding(overflows)


class Finding:
    """The result of a test of gradients: it stays on the device until asked for, and is read once."""

    def __init__(self, overflows: Sequence[paddle.Tensor], squares: paddle.Tensor | None = None) -> None:
        """Put scalars together: True for what is not finite, and a sum of squares to be read along."""
        # The sum of squares that was read along, inf where float32 overflows; None where none was.
        self.squares: float | None = None
        self.overflows = list(overflows)
        self._squares = squares
        self._finite: bool | None = None

    def combine(self, squares: paddle.Tensor | None, before: Finding | bool = True) -> Finding:
        """Return what this and an earlier test of the same gradients found, with a sum of squares."""
        earlier = before.overflows if isinstance(before, Finding) else []
        if squares is None and before is True:
            return self
        both = Finding([*self.overflows, *earlier], squares)
        if before is False:
            both._finite = False
        return both

    def __bool__(self) -> bool:
        """Return whether all were finite. Sync: one, the first time."""
        if self._finite is None:
            alone = self._squares is None and len(self.overflows) == 1
            self._finite = not self.overflows[0].item() if alone else self._read()
        return self._finite

    def _read(self) -> bool:
        numbers = [overflow.astype("float32").reshape([1]) for overflow in self.overflows]
        if self._squares is not None:
            numbers.append(self._squares.reshape([1]))
        if not numbers:
            return True
        values = paddle.concat(numbers).tolist()
        if self._squares is not None:
            self.squares = values.pop()
        return not any(values)


@paddle.no_grad()
def spoil(owners: Sequence[paddle.Tensor], finding: Finding) -> None:
    """Make gradients NaN where the test of them and of others found an overflow.

    Paddle's kernel leaves zeros of all that it was given then, which would pass the next test.
    """
    factor = paddle.where(paddle.concat(finding.overflows).any(), math.nan, 1.0)
    for parameter in with_gradients(owners):
        values = _values(parameter)
        values.multiply_(factor.astype(values.dtype))


def _unscale_dense(batch: list[paddle.Tensor], dtype: Any, scale: float) -> paddle.Tensor:
    place, kind = batch[0].place, "float32"
    if dtype is not paddle.float32:  # Paddle's dtypes are slow to compare
        if place.is_cpu_place() and dtype in (paddle.float16, paddle.bfloat16):
            raise UnsupportedByBackendError(
                f"the gradients are {dtype} on the CPU, where Paddle has no kernel that tests them; accepted: "
                f"float32 and float64. Keep the parameters in float32."
            )
        if dtype == paddle.float64:
            kind = "float64"
    # The name of a place takes long to make.
    where = "cpu" if place.is_cpu_place() else str(place)
    _, overflow = paddle._C_ops.check_finite_and_unscale_(batch, _scalar(scale, kind, where))
    return overflow


@functools.lru_cache(maxsize=32)
def _scalar(scale: float, dtype: Any, place: str) -> paddle.Tensor:
    """Return the scale as a tensor; made once, because scales change rarely. The place is part of the key only."""
    return paddle.full([1], scale, dtype)


def _values(parameter: paddle.Tensor) -> Any:
    """Return the values of a gradient as a dense tensor that shares its memory."""
    gradient = gradient_of(parameter)
    if gradient.is_selected_rows():
        return gradient._get_tensor_from_selected_rows()
    if not gradient.is_dense():
        raise UnsupportedByBackendError(
            f"parameter {parameter.name!r} has a gradient that is neither dense nor SelectedRows, which Paddle cannot "
            f"unscale; accepted: these two. Compute this parameter's gradient densely."
        )
    return gradient.detach()


def _merged_values(owners: Sequence[paddle.Tensor]) -> list[Any]:
    """Return the values of gradients, adding up rows that a sparse one holds several times: each is one row then."""
    for parameter in owners:
        gradient = gradient_of(parameter)
        if gradient.is_selected_rows():
            parameter._set_grad_ivar(paddle._C_ops.merge_selected_rows(gradient))
    return [_values(parameter) for parameter in owners]


@paddle.no_grad()
def rescale(owners: Sequence[paddle.Tensor], factor: float) -> None:
    """Multiply gradients in place, in two steps where float32 does not hold the factor: the product may still fit."""
    fits = FLOAT32_TINY <= factor <= FLOAT32_MAX
    root = math.sqrt(factor)
    for parameter in owners:
        for part in (factor,) if fits else (root, factor / root):
            _values(parameter).scale_(part)


@paddle.no_grad()
def sum_of_squares(owners: Sequence[paddle.Tensor], max_value: float | None = None) -> paddle.Tensor:
    """Return the sum of squares of gradients, as clipped by value, in float32: inf where it overflows."""
    gradients = _merged_values(owners)
    if max_value is not None:
        gradients = [values.clip(-max_value, max_value) for values in gradients]
    squares = [values.astype("float32").square().sum() for values in gradients]
    return paddle.add_n(squares) if squares else paddle.zeros([])


@paddle.no_grad()
def clip(
    owners: Sequence[paddle.Tensor], max_norm: float | None, max_value: float | None, squares: float | None = None
) -> float | None:
    """Clip unscaled, finite gradients in place by value, then by global L2 norm; return the norm before, or None.

    Sync: none where `squares` is what `sum_of_squares` returned, or without a bound; else one. Where the norm is
    beyond float32, one a gradient.
    """
    if max_norm is not None and squares is None:
        squares = float(sum_of_squares(owners, max_value))
    gradients = _merged_values(owners)
    if max_value is not None:
        for values in gradients:
            values.clip_(-max_value, max_value)
    if max_norm is None or squares is None:
        return None
    if not math.isfinite(squares):
        squares = math.fsum(float(values.astype("float64").square().sum()) for values in gradients)
    norm = math.sqrt(squares)
    if max_norm < norm < math.inf:  # else such gradients stay bit for bit
        _shrink(gradients, max_norm / norm)
    return norm


def _shrink(gradients: Sequence[paddle.Tensor], factor: float) -> None:
    """Multiply gradients by a factor below 1, however small."""
    while factor < _SMALLEST_FACTOR:
        _shrink(gradients, _SMALLEST_FACTOR)
        factor /= _SMALLEST_FACTOR
    for values in gradients:
        values.scale_(factor)


def names_in_models(owners: Sequence[paddle.Tensor]) -> dict[str, str]:
    """Return the names of parameters in the models that live, by Paddle's own names; none for what no model holds."""
    names = modules.name_parameters(owners, paddle.nn.Layer, "_sub_layers")
    return {parameter.name: names[id(parameter)] for parameter in owners if id(parameter) in names}


def name_nonfinite(optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
    """List (name, non-finite elements, elements) of parameters with non-finite gradients. Sync: one a gradient."""
    owners = collect(optimizer)
    in_model = () if model is None else model.named_parameters()
    names = names_in_models(owners) if model is None else {parameter.name: name for name, parameter in in_model}
    result = []
    for parameter in owners:
        bad = int((~paddle.isfinite(_values(parameter))).astype("int64").sum())
        if bad:
            result.append((names.get(parameter.name, parameter.name), bad, int(parameter.size)))
    return result


@paddle.no_grad()
def meter_samples(optimizer: Any, gradients: bool) -> list[Sampled]:
    """Sample parameters, or their float32 copies, and dense gradients. Sync: one for each of them."""
    from ampx.numerics.host_meter import Sampled  # it may have been taken out; nothing is metered then

    copies = optimizer._master_weights if optimizer._multi_precision else {}
    sampled = []
    for parameter in parameters(optimizer):
        updated = copies.get(parameter.name, parameter)
        gradient = gradient_of(parameter) if gradients else None
        dense = gradient is not None and not gradient.is_selected_rows()
        slopes = _sample(gradient) if dense else None
        dtype = str(updated.dtype).rpartition(".")[2]
        sampled.append(Sampled(parameter.name, dtype, _sample(updated), slopes))
    return sampled


@paddle.no_grad()
def sample(
    optimizer: Any, samples: int, names: Mapping[str, str]
) -> list[tuple[str, tuple[int, ...], Array | None, Array | None]]:
    """Return name, shape and samples of a raw optimizer's parameters, as they are now.

    These are of the gradient, None for a sparse one, and of the parameter, None where it is not float32.

    Args:
        optimizer: The raw optimizer.
        samples: So many elements at most.
        names: As `names_in_models` returns them.

    Sync: two for each of them.
    """
    sampled = []
    for parameter in parameters(optimizer):
        gradient = gradient_of(parameter)
        dense = gradient is not None and gradient.is_dense() and not gradient.is_selected_rows()
        values = _sample(gradient, samples) if dense else None
        weights = _sample(parameter, samples) if parameter.dtype == paddle.float32 else None
        sampled.append((names.get(parameter.name, parameter.name), tuple(parameter.shape), values, weights))
    return sampled


def _sample(tensor: Any, samples: int = METER_SAMPLES) -> Any:
    """Return elements as float32; few elements come as they are, because four calls take longer than they do."""
    elements = math.prod(tensor.shape)
    values = tensor.detach()
    if elements > samples:
        values = values.reshape([-1])[:: stride(elements, samples)]
    if values.dtype != paddle.float32:
        values = values.astype("float32")
    return values.numpy().reshape(-1)
