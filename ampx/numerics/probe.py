"""What the precision debugger needs of a framework: the contract `Probe`, and what it hands over."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from ampx.backend import Array, CastPlan, Device, Forcing

# Computes the loss of one batch: a scalar tensor of the framework, not scaled, from the model that it is passed.
Step: TypeAlias = Callable[[Any], Any]
Direction: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True)
class Watching:
    """What to look at.

    Attributes:
        dtype: The dtype that `Stats.flushed` and `Stats.overflowed` are about, of `ampx.formats.FORMATS`.
        modules: Patterns (`fnmatch`) of the names of modules; empty for all.
        operations: Read every operation, too, not only modules.
        samples: Keep up to so many elements of every value: those at multiples of `ampx.formats.stride` in row-major
            order, which are the same elements in every replay.
        times: Measure how long the forward pass of each module takes.
    """

    dtype: str = "float16"
    modules: tuple[str, ...] = ()
    operations: bool = False
    samples: int = 0
    times: bool = False

    def watches(self, module: str) -> bool:
        """Return whether a module of this name is to be read."""
        return not self.modules or any(fnmatchcase(module, pattern) for pattern in self.modules)


@dataclass(frozen=True)
class Stats:
    """The floating elements of one or several tensors, reduced on their device.

    Attributes:
        elements: How many there are.
        nonfinite: How many are inf or NaN.
        nan: How many are NaN.
        zeros: How many are zero.
        largest: Largest finite magnitude; 0.0 where there is none.
        smallest: Smallest non-zero finite magnitude; 0.0 where there is none.
        lowest: Smallest finite value; 0.0 where there is none.
        flushed: How many finite elements other than zero the watched dtype rounds to zero (round to nearest even).
        overflowed: How many finite elements it rounds to infinity, or to NaN where it has none.
    """

    elements: int = 0
    nonfinite: int = 0
    nan: int = 0
    zeros: int = 0
    largest: float = 0.0
    smallest: float = 0.0
    lowest: float = 0.0
    flushed: int = 0
    overflowed: int = 0


@dataclass(frozen=True)
class Reading:
    """One value of one call: the output of a module or an operation, or the gradient of that output.

    Attributes:
        module: Name of the module, with dots, as the framework names it within the model; "" for the model itself.
            Of an operation: the innermost module that it ran in.
        kind: Class of the module.
        operation: Name of the operation as the framework has it; "" for a module.
        direction: `"forward"`: the output. `"backward"`: for a module the gradient of its output; for an operation
            what an operation of the backward pass returned.
        call: How many calls of the same module (and operation) came before in this direction.
        dtype: Of the value.
        value: The value itself.
        inputs: What the module or operation received: floating tensors, parameters included for operations only.
            In direction backward empty for a module.
        sample: Elements of the value as float32, one-dimensional; None where none were asked for.
        seconds: Time of the call of a module, waiting for its device included; None where it was not asked for.
        place: The line of the user's code that called the operation, as `"file:line"`, where that is known.
    """

    module: str
    kind: str
    operation: str
    direction: Direction
    call: int
    dtype: str
    value: Stats
    inputs: Stats = field(default_factory=Stats)
    sample: Array | None = None
    seconds: float | None = None
    place: str = ""


class Watch(Protocol):
    """What a region of `Probe.watch` yields."""

    def readings(self) -> list[Reading]:
        """Return what was seen so far, in order of execution. Sync: one a device."""


@dataclass(frozen=True)
class Replayed:
    """One batch, computed and differentiated without a step.

    Attributes:
        loss: The loss, not scaled, as float32.
        gradients: By name of the parameter, its unscaled gradient, divided by the scale in float32. A parameter that
            the loss does not reach is missing.
        parameters: By name, the values of every parameter that the optimizer would train.
    """

    loss: float
    gradients: Mapping[str, Array]
    parameters: Mapping[str, Stats]


class Probe(Forcing):
    """What `compare`, `diagnose`, `tune` and `trace_overflow` call of a framework, beside `Forcing.force`.

    Attributes:
        rounds_unseen: `watch` does not see the operations by which `force` rounds, where a dtype is simulated.
        watches_uncompiled: `watch` runs uncompiled what trains compiled: the times of its readings say nothing about
            training.
    """

    feature: ClassVar[str] = "watching, forcing and replaying modules"
    rounds_unseen: ClassVar[bool] = False
    watches_uncompiled: ClassVar[bool] = False

    def simulates(self, device: Device) -> frozenset[str]:
        """Return the dtypes that a device need not have, to which `force` rounds values: `"float8_e4m3"`, …."""
        return frozenset()

    @abc.abstractmethod
    def watch(self, model: Any | None, watching: Watching) -> AbstractContextManager[Watch]:
        """Return a region that reads the outputs of modules and the gradients of these outputs.

        It changes no value, no dtype and no random number, and compiled parts of the model are seen, too (run
        uncompiled, if need be). Regions nest.

        Args:
            model: The model, or the parameters where these are a value (JAX); None for every model that this process
                calls inside the region, with the names of `ampx.modules.Names`: within the largest model.
            watching: What to look at.

        Raises:
            UnsupportedOpError: A pattern matches no module.

        Sync: not here; `Watch.readings` does.
        """

    @abc.abstractmethod
    def replay(self, model: Any, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
        """Compute the loss of a batch and its gradients, and leave everything as it was.

        Random numbers, weights, buffers (such as running statistics) and pending gradients are put back afterwards, so
        that the next replay draws the same masks and sees the same weights.

        Args:
            model: As for `watch`, but not None.
            step: Returns the loss of one batch, without a backward.
            plan: How to cast; None computes in float32, whatever a session has switched on.
            scale: What the loss is multiplied by before the backward.

        Raises:
            LossError: What `step` returned is no loss.

        Sync: several.
        """

    def clock(self, model: Any, step: Step, plan: CastPlan | None) -> Callable[[], float]:
        """Return a function that computes a batch and its gradients as training does, and returns the seconds it took.

        A call leaves everything as `replay` does. What a replay does besides is not in the seconds, nor what training
        does only once, such as compiling. The default times a replay as a whole.

        Args:
            model: As for `replay`.
            step: As for `replay`.
            plan: As for `replay`.

        Sync: several a call.
        """

        def seconds() -> float:
            began = time.perf_counter()
            self.replay(model, step, plan)
            return time.perf_counter() - began

        return seconds

    def seed(self, number: int) -> None:
        """Seed the random numbers that the framework draws by itself; nothing where it draws none.

        Args:
            number: From 0 to 2**32 - 1.
        """

    def peak_memory(self) -> int | None:
        """Return how many bytes were in use at most on the accelerator of this process; None where nothing counts."""
        return None
