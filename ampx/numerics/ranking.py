"""Modules in the order in which they are likely to be at fault: by measured error, and by what that does to a loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ampx.backend import Array

from .compare import ModuleError
from .forcing import inside
from .probe import Reading


def by_error(
    modules: Sequence[str], errors: Sequence[ModuleError], effects: Mapping[str, float] | None = None
) -> list[str]:
    """Return modules in the order in which they are likely to be needed in float32.

    In front are modules that are not finite though all that they hold is: they break by themselves. Then come those
    without others inside, that which adds most to the error of values or of the loss in front, of equals the last; then
    those that hold others, the innermost first, for what they compute themselves.

    Args:
        modules: Names of all modules.
        errors: Of the values of modules, in order of execution.
        effects: By module, how far the loss is off by what its outputs are off by, in first order, relative to it.
    """
    holds = {name for name in modules if any(inside(other, name) for other in modules)}
    added = _added(errors, holds)
    for name, effect in _growing(effects or {}, holds):
        added[name] = max(effect, added.get(name, 0.0))
    alone = _broken_alone(holds, errors)
    leaves = sorted((name for name in reversed(modules) if name not in holds), key=lambda name: -added.get(name, 0.0))
    inner = sorted(holds.difference(alone), key=lambda name: -name.count(".") if name else 1)
    return alone + leaves + inner


def _broken_alone(holds: Collection[str], errors: Iterable[ModuleError]) -> list[str]:
    """Return the modules with others inside that are not finite where all inside is."""
    broken = dict.fromkeys(entry.module for entry in errors if entry.direction == "forward" and math.isinf(entry.error))
    return [name for name in broken if name in holds and not any(inside(other, name) for other in broken)]


def _growing(effects: Mapping[str, float], holds: Container[str]) -> Iterator[tuple[str, float]]:
    """Yield by how much each module that holds no other moves the loss more than the module before."""
    before = 0.0
    for name, effect in effects.items():
        if name not in holds:
            yield name, effect - before
            before = effect


def _added(errors: Iterable[ModuleError], holds: Container[str]) -> dict[str, float]:
    """Return by how much the error at a module is larger than that at the module before, at most."""
    added: dict[str, float] = {}
    before: dict[str, ModuleError] = {}
    for entry in errors:
        if entry.module in holds:
            continue
        last = before.get(entry.direction)
        error = 0.0 if last is None else last.error
        step = 0.0 if math.isinf(error) else entry.error - error
        # A gradient goes wrong in the backward of the module that it came through, or by what the module returned.
        through = [last] if entry.direction == "backward" and last is not None else []
        for module in {other.module for other in (*through, entry)}:
            added[module] = max(step, added.get(module, 0.0))
        before[entry.direction] = entry
    return added


def first_order(reference: Sequence[Reading], low: Sequence[Reading], loss: float) -> dict[str, float]:
    """Return how far a loss is off by what outputs of modules are off by, in first order, relative to the loss.

    That is the gradient of the output, of the one backward in float32, times the difference of the outputs.

    Args:
        reference: Readings in float32, with samples.
        low: Readings of the same batch in low precision, with samples.
        loss: In float32.
    """
    outputs, gradients = (_sampled(reference, direction) for direction in ("forward", "backward"))
    values = _sampled(low, "forward")
    sizes = {(entry.module, entry.call): entry.value.elements for entry in reference if entry.direction == "forward"}
    effects: dict[str, float] = {}
    for key in [key for key in outputs if key in gradients and key in values]:
        if outputs[key].shape == gradients[key].shape == values[key].shape:
            with np.errstate(invalid="ignore", over="ignore"):  # of what is not finite nothing is known in first order
                product = float(np.dot(gradients[key], values[key] - outputs[key]))
            moved = product * sizes[key] / max(1, outputs[key].size)
            effect = abs(moved) / (abs(loss) or 1.0)
            effects[key[0]] = max(effect if math.isfinite(effect) else 0.0, effects.get(key[0], 0.0))
    return effects


def _sampled(readings: Iterable[Reading], direction: str) -> dict[tuple[str, int], Array]:
    """Return the samples of modules' values by module and call."""
    return {
        (entry.module, entry.call): np.asarray(entry.sample, np.float64)
        for entry in readings
        if entry.direction == direction and not entry.operation and entry.sample is not None
    }
