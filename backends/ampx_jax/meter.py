"""The meter: what an update did to a sample of every parameter, counted on the device in every hundredth step.

The counts are one array of the optimizer's state. A step that is not looked at hands it on, and nothing asks the host.
Numbers are compared as bits: a compiler may leave out roundings between floats, and flush small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx.formats import FORMATS, stride
from ampx.protocol import METER_SAMPLES

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

_NUMBERS = 4  # of a parameter: moved, unchanged, flushed, and the bits of the largest magnitude
_INFINITE = 0x7F800000  # the bits of infinity; those of finite magnitudes are smaller


def empty(parameters: int) -> Any:
    """Return the array before the first reading: the step, the bits of the loss scale, and zeros for each parameter."""
    return jnp.zeros(2 + _NUMBERS * parameters, jnp.int32)


class Leaf(NamedTuple):
    """A parameter in a step.

    Attributes:
        param: The parameter.
        before: What is updated: the parameter, or its float32 copy.
        update: What the wrapped transformation would add to that.
        gradient: Its unscaled gradient.
        add: Returns what `before` becomes, in float32, of float32 samples of the first three.
    """

    param: Any
    before: Any
    update: Any
    gradient: Any
    add: Callable[[Any, Any, Any], Any]


def look(numbers: Any, step: Any, scale: Any, compute: str, leaves: Sequence[Leaf | None]) -> Any:
    """Return the array after a step that updates; as it is, where the step only gathers gradients.

    Args:
        numbers: The array.
        step: The step, counted from 1.
        scale: The loss scale of the gradients.
        compute: The compute dtype.
        leaves: Every parameter; None where it has no gradient.
    """
    rows = [_row(leaf, scale, compute) for leaf in leaves]
    updated = sum(proposed for *_, proposed in rows)
    scalars = [step.astype(jnp.int32), _bits(scale), *(number for row in rows for number in row[:-1])]
    return jnp.where(updated > 0, jnp.stack(scalars), numbers)


def _row(leaf: Leaf | None, scale: Any, compute: str) -> Sequence[Any]:
    """Return the numbers of a parameter, and for how many of the elements an update was proposed."""
    if leaf is None:
        return (jnp.int32(0),) * (_NUMBERS + 1)
    param, before, update, gradient = map(_sampled, leaf[:4])
    after = leaf.add(param, before, update)
    magnitude = _bits(gradient * scale) & 0x7FFFFFFF
    moved = (magnitude != 0) & (magnitude < _INFINITE)
    same = _bits(before) == _bits(after)
    same |= (_bits(before) | _bits(after)) & 0x7FFFFFFF == 0  # zeros of either sign
    flushes = int(np.float32(FORMATS[compute].flushes_to).view(np.int32))
    columns = (
        *(mask.astype(jnp.int32) for mask in (moved, moved & same, moved & (magnitude <= flushes))),
        jnp.where(magnitude < _INFINITE, magnitude, 0),
        (_bits(update) & 0x7FFFFFFF != 0).astype(jnp.int32),
    )
    # One reduction: several would keep samples in memory that every step allocates, also those that look at nothing.
    return jax.lax.reduce(columns, (np.int32(0),) * len(columns), _joined, (0,))


def _joined(left: Any, right: Any) -> Any:
    counts = [a + b for a, b in zip(left, right, strict=True)]
    counts[3] = jnp.maximum(left[3], right[3])
    return tuple(counts)


def _sampled(values: Any) -> Any:
    return values.reshape(-1)[:: stride(values.size, METER_SAMPLES)].astype(jnp.float32)


def _bits(values: Any) -> Any:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def reading(numbers: Any, compute: str, parameters: Sequence[tuple[str, int, str]]) -> Meter | None:
    """Return what the array holds; None before the first reading.

    Args:
        numbers: The array, on the host.
        compute: The compute dtype.
        parameters: Of every parameter its name, elements and dtype.
    """
    if not numbers[0]:
        return None
    from ampx.numerics.meter import Meter, ParameterMeter  # it may have been taken out; nothing is metered then

    bits = np.asarray(numbers, np.int32)
    rows = bits[2:].reshape(-1, _NUMBERS)
    room = math.log2(FORMATS[compute].largest)
    entries = []
    for (name, elements, dtype), row in zip(parameters, rows, strict=True):
        moved, unchanged, flushed, _ = row.tolist()
        largest = float(row.view(np.float32)[3])
        sampled = -(-elements // stride(elements, METER_SAMPLES))
        headroom = room - math.log2(largest) if largest else None
        entries.append(ParameterMeter(name, dtype, sampled, moved, unchanged, flushed, 0, headroom))
    return Meter(int(bits[0]), compute, float(bits[1:2].view(np.float32)[0]), tuple(entries))
