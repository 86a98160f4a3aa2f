"""Mistakes in how the precision debugger looks into the toy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from ampx.backend import CastPlan
from ampx.numerics import watching as logs
from ampx.numerics.probe import Reading, Replayed, Stats, Step, Watch, Watching
from toy import framework
from toy.framework import Module, Tensor
from toy.numerics import ToyProbe

# The regions that nobody closed but who judges.
left_open: Final = ExitStack()


class Blinkered:
    """A watch that passes on what a function makes of the readings."""

    def __init__(self, watch: Watch, change: Callable[[list[Reading]], list[Reading]]) -> None:
        self.watch, self.change = watch, change

    def readings(self) -> list[Reading]:
        """Return the changed readings."""
        return self.change(self.watch.readings())


@contextmanager
def blinkered(
    region: AbstractContextManager[Watch], change: Callable[[list[Reading]], list[Reading]]
) -> Iterator[Blinkered]:
    """Watch with blinkers."""
    with region as watch:
        yield Blinkered(watch, change)


def sees_forward(readings: list[Reading]) -> list[Reading]:
    """Miss the backward pass."""
    return [reading for reading in readings if reading.direction == "forward"]


def inf_is_finite(readings: list[Reading]) -> list[Reading]:
    """Count infinity as a finite number."""
    return [replace(entry, value=replace(entry.value, nonfinite=entry.value.nan)) for entry in readings]


def no_inputs(readings: list[Reading]) -> list[Reading]:
    """Look at outputs only."""
    return [replace(reading, inputs=Stats()) for reading in readings]


def one_name_a_class(readings: list[Reading]) -> list[Reading]:
    """Call all but the first model of a class by the same names."""
    return [replace(reading, module=re.sub("#[0-9]+:", ":", reading.module)) for reading in readings]


@contextmanager
def samples_each_tensor(self: ToyProbe, model: Module | None, watching: Watching) -> Iterator[Watch]:
    """Keep as many elements of every tensor as are wanted of the whole value."""

    def each(sizes: Sequence[int], samples: int) -> tuple[slice, ...]:
        return tuple(slice(0, None, max(1, -(-size // samples))) for size in sizes)

    with ToyProbe.watch(self, model, watching) as watch, mock.patch.object(logs, "sample_slices", each):
        yield watch


@contextmanager
def watches_on(self: ToyProbe, model: Module | None, watching: Watching) -> Iterator[Watch]:
    """Go on reading when the region is left."""
    yield left_open.enter_context(ToyProbe.watch(self, model, watching))


@contextmanager
def watches_rounded(self: ToyProbe, model: Module | None, watching: Watching) -> Iterator[Watch]:
    """Let the dtype that is watched be the dtype of the values."""
    with ToyProbe.force(self, model, {"*": watching.dtype}), ToyProbe.watch(self, model, watching) as watch:
        yield watch


@contextmanager
def watches_named_models(self: ToyProbe, model: Module | None, watching: Watching) -> Iterator[Watch]:
    """See nothing where no model is named."""
    with ToyProbe.watch(self, Module() if model is None else model, watching) as watch:
        yield watch


@contextmanager
def forces_forward(self: ToyProbe, model: Module | None, dtypes: Mapping[str, str]) -> Iterator[None]:
    """Round what comes out, and leave the backward pass in float32."""

    def rounds(module: Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        exact, low = call(x), dtypes[next(iter(dtypes))]
        name = next((name for name, inside in model.named_modules() if inside is module), "") if model else ""
        if name not in dtypes or low not in framework.FLOATING:
            return exact
        return Tensor(exact.to(low).data, low, [(exact, lambda upstream: upstream)])

    framework.around_modules.append(rounds)
    try:
        yield
    finally:
        framework.around_modules.remove(rounds)


@contextmanager
def keeps_forcing(self: ToyProbe, model: Module | None, dtypes: Mapping[str, str]) -> Iterator[None]:
    """Go on forcing when the region is left."""
    left_open.enter_context(ToyProbe.force(self, model, dtypes))
    yield


def draws_another_mask(
    self: ToyProbe, model: Module, step: Step, plan: CastPlan | None, scale: float = 1.0
) -> Replayed:
    """Draw other random numbers in every replay."""
    try:
        return ToyProbe.replay(self, model, step, plan, scale)
    finally:
        framework.generator.random()


def keeps_buffers(self: ToyProbe, model: Module, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
    """Leave the buffers as the batch left them."""
    replayed = ToyProbe.replay(self, model, step, plan, scale)
    model.calls += 1
    return replayed


def cast_as_now(step: Step) -> Step:
    """Cast as the session has it."""
    state = framework.casting_state()

    def cast(model: Any) -> Any:
        with framework.autocast(state):
            return step(model)

    return cast


def replays_anything(self: ToyProbe, model: Module, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
    """Take anything for a loss."""
    if isinstance(step(model), str):
        return Replayed(0.0, {}, {})
    return ToyProbe.replay(self, model, step, plan, scale)
