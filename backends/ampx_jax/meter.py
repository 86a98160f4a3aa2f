"""The meter: what an update did to a sample of every parameter, counted on the device in every hundredth step.

The counts are one array of the optimizer's state. A step that is not looked at hands it on, and nothing asks the host.
Numbers are compared as bits: a compiler may leave out roundings between floats, and flush small ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ampx.backend import CastPlan
from ampx.formats import FORMATS, stride
from ampx.protocol import ScaleGroup
from ampx.rooms import METER_SAMPLES

from . import masters, varying
from .casting import is_traced
from .state import AmpState, Transformation
from .taps import is_floating

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

_NUMBERS = 4  # of a parameter: moved, unchanged, flushed, and the bits of the largest magnitude
_INFINITE = 0x7F800000  # the bits of infinity; those of finite magnitudes are smaller


def metered(tx: Transformation, group: ScaleGroup, plan: CastPlan | None) -> Transformation:
    """Return a transformation that counts, every so many steps, what it did to a sample of parameters; owns `meter`."""
    # The branch that looks keeps values in memory that XLA would fuse away, in every step: where no update can be lost
    # it is left out, unless it is asked for.
    if group.meter_every < 1 or not (group.meter_asked or (plan is not None and plan.level == "O3")):
        return tx

    def init(params: Any) -> AmpState:
        empty = jnp.zeros(2 + _NUMBERS * len(jax.tree.leaves(params)), jnp.int32)
        return tx.init(params)._replace(meter=empty)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AmpState]:
        gradients = updates
        updates, state = tx.update(gradients, state, params, **extra)
        if state.meter is None or params is None:
            return updates, state
        numbers = state.numbers

        def look() -> Any:
            rows: list[Sequence[Any]] = []
            row = functools.partial(_row, numbers.step_scale, state.settings.compute)
            before = masters.full(state.masters, params)
            jax.tree.map(lambda *leaves: rows.append(row(*leaves)), params, before, updates, gradients)
            if len(rows) != len(state.settings.parameters):
                return state.meter
            updated = sum(proposed for *_, proposed in rows)  # no elements where the step only gathers gradients
            counts = [numbers.steps.astype(jnp.int32), _bits(numbers.step_scale)]
            counts += [number for row in rows for number in row[:-1]]
            return jnp.where(updated > 0, jnp.stack(counts), state.meter)

        # What it looks at is in memory by now: in the branch that updates, XLA would fuse less in every step.
        looks = numbers.finite & (numbers.steps % group.meter_every == 0)
        counts = varying.switch(looks.astype(jnp.int32), [lambda: state.meter, look])
        if is_traced(looks):
            updates = jax.tree.map(functools.partial(_after_look, counts), updates)
        return updates, state._replace(meter=counts)

    return Transformation(init, update)


def _after_look(counts: Any, update: Any) -> Any:
    """Return the update as it is, in a form that says to the compiler that the meter has looked.

    Nothing else orders the look before the addition that overwrites a parameter, and XLA would keep a copy of every
    parameter in every step. A barrier it has dropped by then. The first number is a step, which is never negative.
    """
    if not is_floating(update) or not varying.follows(update, counts):
        return update
    return jnp.where(counts[0] >= 0, update, jnp.asarray(-0.0, update.dtype))


def _row(scale: Any, compute: str, param: Any, before: Any, update: Any, gradient: Any) -> Sequence[Any]:
    """Return the numbers of a parameter, and for how many of the elements an update was proposed.

    The update is of what stands at `before`: the parameter, or its float32 copy.
    """
    if not all(map(is_floating, (param, update, gradient))):
        return (jnp.int32(0),) * (_NUMBERS + 1)
    dtype, has_copy = param.dtype, before.dtype != param.dtype
    param, before, update, gradient = map(_sampled, (param, before, update, gradient))
    if has_copy:
        after = masters.after(dtype, param, before, update)
    else:
        after = (param + update).astype(dtype).astype(jnp.float32)  # as `optax.apply_updates` adds
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
    values = varying.unsharded(values)
    return values.reshape(-1)[:: stride(values.size, METER_SAMPLES)].astype(jnp.float32)


def _bits(values: Any) -> Any:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def reading(numbers: Any, compute: str, parameters: Sequence[tuple[str, int, str]]) -> Meter | None:
    """Return what the array holds, on the host; None before the first reading. `parameters` is that of `Settings`."""
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
