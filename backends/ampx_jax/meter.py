"""The meter: what an update did to a sample of every parameter, counted on the device in every hundredth step.

The counts are one array of the optimizer's state. A step that is not looked at hands it on, and nothing asks the host.
Numbers are compared as bits: a compiler may leave out roundings between floats, and flush small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ampx.numerics.formats import FORMATS
from ampx.numerics.meter import SAMPLES, Meter, ParameterMeter
from ampx.numerics.watching import stride

from . import varying

_NUMBERS = 4  # of a parameter: moved, unchanged, flushed, and the bits of the largest magnitude
_INFINITE = 0x7F800000  # the bits of infinity; those of finite magnitudes are smaller


def empty(parameters: int) -> Any:
    """Return the array before the first reading: the step, the bits of the loss scale, and zeros for each parameter."""
    return jnp.zeros(2 + _NUMBERS * parameters, jnp.int32)


class Leaf(NamedTuple):
    """A parameter in a step.

    Attributes:
        before: What was updated, before it was: the parameter, or its float32 copy.
        param: The parameter.
        update: What is added to it.
        proposed: What the wrapped transformation returned: zeros while it gathers gradients.
        gradient: Its true gradient.
    """

    before: Any
    param: Any
    update: Any
    proposed: Any
    gradient: Any


def look(numbers: Any, due: Any, step: Any, scale: Any, compute: str, leaves: Sequence[Leaf | None]) -> Any:
    """Return the array after a step: a new reading where one is due and there is an update.

    Args:
        numbers: The array.
        due: Whether to look.
        step: The step, counted from 1.
        scale: The loss scale of the gradients.
        compute: The compute dtype.
        leaves: Every parameter; None where it has no gradient.
    """

    def read() -> Any:
        rows = [_row(leaf, scale, compute) for leaf in leaves]
        head = jnp.stack([step.astype(jnp.int32), _bits(scale)])
        updated = sum(proposed for _, proposed in rows)
        return jnp.where(updated > 0, jnp.concatenate([head, *(row for row, _ in rows)]), numbers)

    return varying.cond(due, read, lambda: numbers)


def _row(leaf: Leaf | None, scale: Any, compute: str) -> tuple[Any, Any]:
    """Return the numbers of a parameter, and for how many of the elements an update was proposed."""
    if leaf is None:
        return jnp.zeros(_NUMBERS, jnp.int32), jnp.int32(0)
    before, param, update, proposed, gradient = map(_sampled, leaf)
    after = (param + update).astype(leaf.before.dtype).astype(jnp.float32)
    magnitude = _bits(gradient * scale) & 0x7FFFFFFF
    moved = (magnitude != 0) & (magnitude < _INFINITE)
    same = _bits(before) == _bits(after)
    same |= (_bits(before) | _bits(after)) & 0x7FFFFFFF == 0  # zeros of either sign
    flushes = int(np.float32(FORMATS[compute].flushes_to).view(np.int32))
    largest = jnp.max(jnp.where(magnitude < _INFINITE, magnitude, 0), initial=0)
    counts = [jnp.sum(mask, dtype=jnp.int32) for mask in (moved, moved & same, moved & (magnitude <= flushes))]
    return jnp.stack([*counts, largest]), jnp.sum(_bits(proposed) & 0x7FFFFFFF != 0, dtype=jnp.int32)


def _sampled(values: Any) -> Any:
    return values.reshape(-1)[:: stride(values.size, SAMPLES)].astype(jnp.float32)


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
    bits = np.asarray(numbers, np.int32)
    rows = bits[2:].reshape(-1, _NUMBERS)
    room = math.log2(FORMATS[compute].largest)
    entries = []
    for (name, elements, dtype), row in zip(parameters, rows, strict=True):
        moved, unchanged, flushed, _ = row.tolist()
        largest = float(row.view(np.float32)[3])
        sampled = -(-elements // stride(elements, SAMPLES))
        headroom = room - math.log2(largest) if largest else None
        entries.append(ParameterMeter(name, dtype, sampled, moved, unchanged, flushed, 0, headroom))
    return Meter(int(bits[0]), compute, float(bits[1:2].view(np.float32)[0]), tuple(entries))
