"""What a run of `ampx run` sees: time by phase, operations by dtype, steps, and the way of the loss scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol

from ampx.events import Event, PrecisionLost, ScaleChanged, ScaleCollapsed, StepSkipped
from ampx.rooms import METER_EVERY

if TYPE_CHECKING:
    from ampx.backend import Array, Backend
    from ampx.numerics.meter import Meter

    from .run import Run

SCHEMA: Final = "ampx.run/1"
# The first steps tell which operations run in which dtype; the others do not pay for being counted.
SAMPLED_STEPS: Final = 3
CURVE_POINTS: Final = 256
# Elements that are kept of a gradient.
GRADIENT_SAMPLES: Final = 256
FORWARD: Final = "forward"


class _Phase:
    """A region whose time is added up under its name. Made once a name, entered in every step."""

    __slots__ = ("_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def __enter__(self) -> None:
        """Start the clock of this phase; that of the phase around it stands still."""
        recorder = self._recorder
        if get_ident() != recorder._thread:
            return
        now = perf_counter()
        stack = recorder._stack
        if recorder._mark is not None:
            before = stack[-1] if stack else FORWARD
            recorder.seconds[before] = recorder.seconds.get(before, 0.0) + now - recorder._mark
        recorder._mark = now
        stack.append(self._name)

    def __exit__(self, *error: object) -> None:
        recorder = self._recorder
        if get_ident() != recorder._thread or recorder._mark is None:
            return
        now = perf_counter()
        name = recorder._stack.pop()
        recorder.seconds[name] = recorder.seconds.get(name, 0.0) + now - recorder._mark
        recorder._mark = now


@dataclass
class OptimizerRecord:
    """One wrapped optimizer, or one list of optimizers that share a loss scale."""

    initial_scale: float  # the loss scale at the start
    # The class of each, and the script's line that made it, "" where that is not known.
    optimizers: list[tuple[str, str]] = field(default_factory=list)
    steps: int = 0  # steps that the script asked for and that had gradients; skipped ones included
    skipped: list[int] = field(default_factory=list)  # numbers of the skipped ones, from 1
    # `[step, scale]` after every step that moved the loss scale.
    scales: list[tuple[int, float]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Names of the classes, with commas between."""
        return ", ".join(dict.fromkeys(kind for kind, _ in self.optimizers))

    @property
    def skips_unscaled(self) -> bool:
        """Whether the last step was skipped at a scale of 1: no scale that backs off mends that."""
        scale = self.scales[-1][1] if self.scales else self.initial_scale
        return scale <= 1 and bool(self.skipped) and self.skipped[-1] == self.steps

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON types; of several optimizers the place is that of the first."""
        values = asdict(self)
        return {"kind": self.kind, "place": values.pop("optimizers")[0][1], **values}


def names_of(optimizers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each optimizer: its class, and where that is not enough the line that made it, or a number."""
    kinds = [optimizer["kind"] for optimizer in optimizers]
    names = []
    for position, optimizer in enumerate(optimizers):
        kind, place = optimizer["kind"], optimizer["place"]
        if kinds.count(kind) > 1:
            same = [other for other in optimizers if (other["kind"], other["place"]) == (kind, place)]
            number = "" if place and len(same) == 1 else f" {1 + kinds[:position].count(kind)}"
            kind = f"{kind}{number}" + (f" ({PurePath(place).name})" if place else "")
        names.append(kind)
    return names


def names_by_group(optimizers: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Return the name of each optimizer by its group."""
    return {optimizer["group"]: name for optimizer, name in zip(optimizers, names_of(optimizers), strict=True)}


@dataclass
class MeterRecord:
    """What the meter of one optimizer saw, update by update that it looked at."""

    kind: str  # name of the optimizer's class
    meters: list[Meter] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the totals by step, the shares by parameter and step, and all of the last update."""
        last = self.meters[-1]
        names = [entry.name for entry in last.parameters]
        entries = [{entry.name: entry for entry in meter.parameters} for meter in self.meters]
        return {
            "optimizer": self.kind,
            "dtype": last.dtype,
            "steps": [meter.step for meter in self.meters],
            **{name: [getattr(meter, name) for meter in self.meters] for name in ("lost", "flushed", "headroom")},
            "map": {
                "parameters": names,
                "lost": [[row[name].lost if name in row else None for row in entries] for name in names],
                "flushed": [[row[name].flushed_share if name in row else None for row in entries] for name in names],
            },
            "last": last.to_json(),
        }


@dataclass(frozen=True)
class SampledGradient:
    """One parameter in the step of its optimizer.

    Attributes:
        name: Name of the parameter.
        shape: Its shape.
        values: Up to `GRADIENT_SAMPLES` elements of its gradient as float32, at multiples of a stride, scaled or not;
            None where it has no gradient, or a sparse one.
        weights: The same elements of the parameter itself before the step; None where it is not stored in float32, or
            they are not known.
    """

    name: str
    shape: tuple[int, ...]
    values: Array | None
    weights: Array | None = None


def with_weights(after: Iterable[SampledGradient], before: Iterable[SampledGradient]) -> list[SampledGradient]:
    """Return what was sampled after a step with the weights that were sampled before it."""
    weights = {entry.name: entry.weights for entry in before}
    return [replace(entry, weights=weights.get(entry.name)) for entry in after]


class Observer(Protocol):
    """An observer of a run while it goes on: see `ampx.numerics`."""

    def loss(self, read: Callable[[], float]) -> None:
        """Note the loss of a backward, not scaled.

        Args:
            read: Returns it; not called before the step is over, because it may sync.
        """

    def stepped(self, steps: int) -> None:
        """Note that so many steps are over, skipped ones included."""

    def mistake(self, sentence: str) -> None:
        """Note what the script itself does wrong, with its line."""

    def note(self, sentence: str) -> None:
        """Note what could not be observed, or what observing has changed."""

    def observing(self, run: Run, backend: Backend) -> AbstractContextManager[Any]:
        """Return a region that is entered when a framework is automated, and left before it is so no more."""


class LossCurve:
    """Keeps the losses of a few hundred steps, spread over all, as functions that read them, so that nothing waits."""

    def __init__(self) -> None:
        self._every = 1
        self._kept: list[tuple[int, Callable[[], tuple[int, float]], int | None]] = []
        self._of_this_step: list[Callable[[], float]] = []

    def wants(self, before: int) -> bool:
        """Return whether the loss is kept of an optimizer's step, or of a compiled function's call, after so many."""
        return before % self._every == 0

    def loss(self, read: Callable[[], float]) -> None:
        """Note a loss of this step, as `Observer.loss` does."""
        self._of_this_step.append(read)

    def stepped(self, steps: int, group: int, before: int) -> None:
        """Note that so many steps are over, the last of an optimizer (by group) after so many of its own."""
        readers, self._of_this_step = self._of_this_step, []
        if readers and self.wants(before):
            self.keep(before, lambda: (steps, sum(read() for read in readers)), group)

    def keep(self, before: int, read: Callable[[], tuple[int, float]], group: int | None = None) -> None:
        """Keep what reads the number of a step and its loss, where the host learns both later; `before` as `wants`."""
        self._kept.append((before, read, group))
        if len(self._kept) > CURVE_POINTS:
            self._every *= 2
            self._kept = [entry for entry in self._kept if self.wants(entry[0])]

    def points(self) -> list[tuple[int, float | str, int | None]]:
        """Return step, loss, which is text where it is not finite, and group, None if not known. Sync: one a loss."""
        points: list[tuple[int, float | str, int | None]] = []
        for _, read, group in self._kept:
            with suppress(Exception):  # a tensor that the framework has freed, say
                step, loss = read()
                points.append((step, loss if math.isfinite(loss) else str(loss), group))
        return sorted(points, key=lambda point: point[0])


class Recorder:
    """Takes down what the summary of a run tells. Reads clocks of the host only: it never waits for a device.

    A backend calls `add_optimizer` when it wraps one, `phase("backward")` and `phase("step")` around those,
    `stepped` after each step, and `count_op` while `sampling`. Skipped steps and the loss scale come by themselves,
    as events of the session that `Run.session` started. What lies between two phases counts as `"forward"`: the
    forward pass and all else in the training loop. A framework that trains in one call (`fit`, a compiled step)
    uses one phase, `"train"`.
    """

    def __init__(self, sampled_steps: int = SAMPLED_STEPS) -> None:
        # What was wrapped, by the position of its loss scale in `amp.state_dict()`.
        self.optimizers: dict[int, OptimizerRecord] = {}
        self.seconds: dict[str, float] = {}  # time on the host by phase
        # How often an operation ran in a dtype while sampling: `(name, dtype)`.
        self.ops: Counter[tuple[str, str]] = Counter()
        self.notes: list[str] = []  # sentences for the end of the summary
        self.scaled: list[str] = []  # what the script reads that carries the loss scale; the headline says so
        self.steps = 0  # steps of all optimizers
        self.turn: int | None = None  # the optimizer that stepped last, by the position of its loss scale
        self.sampled_steps = sampled_steps  # how many steps are sampled
        # The observer; None in an ordinary run. A backend that sees a loss before its backward calls `observer.loss`.
        self.observer: Observer | None = None
        # Takes what an optimizer trains in this step: a backend calls it before `stepped`, while gradients are there.
        # None where it is not wanted.
        self.takes_gradients: Callable[[Iterable[SampledGradient]], None] | None = None
        # Keeps losses for a report; None where none is written.
        self.curve: LossCurve | None = None
        # Returns what the meters of the optimizers say, each with the optimizer's number and the name of its class.
        self.metering: Callable[[], Iterable[tuple[int, str, Meter | None]]] | None = None
        # Returns the learning rates of what steps with a loss scale, by its position, where the backend knows them.
        self.learning_rates: Callable[[int], tuple[float, ...]] = lambda group: ()
        self.meter_every = METER_EVERY
        self.meters: dict[int, MeterRecord] = {}
        self._lossy: set[int] = set()
        self._sampled_from = 0
        self._phases: dict[str, _Phase] = {}
        self._stack: list[str] = []
        self._mark: float | None = None
        self._thread = get_ident()

    # -- losses ------------------------------------------------------------------------------------

    @property
    def reads_losses(self) -> bool:
        """Whether an observer wants the losses of some steps: what is compiled now returns them."""
        return self.observer is not None or self.curve is not None

    @property
    def wants_losses(self) -> bool:
        """Whether an observer wants the loss of this step: a backend that sees it calls `saw_loss`."""
        if self.observer is not None or self.curve is None:
            return self.observer is not None
        # Which optimizer steps next is not known, and each has a curve of its own.
        counts = [record.steps for record in self.optimizers.values()] or [0]
        return any(map(self.curve.wants, counts))

    def saw_loss(self, read: Callable[[], float]) -> None:
        """Hand on the loss of a backward, not scaled, as a function that reads it when it may be waited for."""
        if self.observer is not None:
            self.observer.loss(read)
        if self.curve is not None:
            self.curve.loss(read)

    # -- optimizers and steps ----------------------------------------------------------------------

    def add_optimizer(self, kind: str, initial_scale: float, group: int | None = None, place: str = "") -> int:
        """Note that an optimizer was wrapped; the clock of the forward pass starts with the first.

        Args:
            kind: Name of its class.
            initial_scale: Its loss scale.
            group: Position of its loss scale in `amp.state_dict()`; by default the next one.
            place: The script's line that made it, as `script_line` gives it.

        Returns:
            That position, for `stepped`.
        """
        if group is None:
            group = len(self.optimizers)
        self.optimizers.setdefault(group, OptimizerRecord(initial_scale)).optimizers.append((kind, place))
        if self._mark is None:
            self._mark = perf_counter()
        return group

    def stepped(self, group: int, count: int = 1) -> None:
        """Note that an optimizer stepped (or skipped), after gradients that counted."""
        record = self.optimizers[group]
        before = record.steps // self.meter_every
        record.steps += count
        self.steps += count
        self.turn = group
        looks = record.steps // self.meter_every
        # Reading a meter may wait for the device: in an ordinary run after 100, 200, 400, 800 ... steps.
        if looks > before and (self.observer is not None or looks & (looks - 1) == 0):
            self.read_meters()
        if self.curve is not None:
            self.curve.stepped(self.steps, group, record.steps - count)
        if self.observer is not None:
            self.observer.stepped(self.steps)

    def read_meters(self) -> None:
        """Take down what the meters say now. Sync: one a device and optimizer."""
        if self.metering is None:
            return
        for key, kind, meter in self.metering():
            if meter is not None:
                self.metered(key, kind, meter)

    def metered(self, key: int, kind: str, meter: Meter) -> None:
        """Take down what a meter says of an optimizer, by a number for it and the name of its class."""
        record = self.meters.setdefault(key, MeterRecord(kind))
        if not record.meters or record.meters[-1].step != meter.step:
            record.meters.append(meter)

    def hear(self, event: Event) -> None:
        """Take an event of the session; `Run.session` has made this a listener."""
        record = self.optimizers.get(event.group)
        if record is None:
            return
        if isinstance(event, StepSkipped):
            record.skipped.append(event.step)
        elif isinstance(event, ScaleChanged):
            record.scales.append((event.step, event.next_scale))
        elif isinstance(event, ScaleCollapsed):
            self.note(f"The loss scale of {record.kind} collapsed by step {event.step}: {event.advice}")
        elif isinstance(event, PrecisionLost) and event.group not in self._lossy:
            self._lossy.add(event.group)  # what is lost once is lost all the time
            self.note(
                f"In step {event.step} of {record.kind}, {event.lost:.0%} of the sampled updates rounded to nothing, "
                f"and {event.flushed:.0%} of the gradients were below what the compute dtype can hold."
            )

    # -- operations --------------------------------------------------------------------------------

    @property
    def sampling(self) -> bool:
        """Whether operations are to be counted: during the first steps. Ask between steps, not in every operation."""
        return self.steps - self._sampled_from < self.sampled_steps

    def count_op(self, name: str, dtype: str, count: int = 1) -> None:
        """Note that an operation computed in a dtype (`"bfloat16"`, `"float32"`, ...)."""
        self.ops[name, dtype] += count

    def stop_sampling(self) -> None:
        """Forget operations of which too few steps were seen, because another session goes on."""
        if self.sampling:
            self.ops.clear()
            self.sampled_steps = 0

    def restart_sampling(self) -> None:
        """Forget the operations seen so far, and sample the next steps: those of another session."""
        self.ops.clear()
        self.sampled_steps = SAMPLED_STEPS
        self._sampled_from = self.steps

    @property
    def steps_sampled(self) -> int:
        """How many steps the operations are of."""
        return min(self.sampled_steps, self.steps - self._sampled_from)

    def note(self, sentence: str) -> None:
        """Add a sentence to the end of the summary, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def note_scaled(self, what: str) -> None:
        """Note a number that the script reads multiplied by the loss scale, where it cannot be divided; once.

        Args:
            what: What reads it, and where, as `"a multi-grad hook (train.py:31)"`.
        """
        if what not in self.scaled:
            self.scaled.append(what)

    def begin_child(self) -> None:
        """Start anew in a copy of the recorded process."""
        for record in self.optimizers.values():
            if record.scales:
                record.initial_scale = record.scales[-1][1]
            record.steps, record.skipped, record.scales = 0, [], []
        self.steps = 0
        self.seconds.clear()
        self.meters.clear()
        self.curve = None if self.curve is None else LossCurve()
        self.notes.clear()
        self.scaled.clear()
        self._stack.clear()
        self.restart_sampling()
        self._thread = get_ident()
        self._mark = perf_counter() if self.optimizers else None

    # -- time --------------------------------------------------------------------------------------

    def phase(self, name: str) -> _Phase:
        """Return a region whose time counts as "backward", "step" or "train", without that of a region inside."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self, name)
        return phase

    # -- the report --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain JSON types. Sync: one a loss that was kept."""
        optimizers = [{**record.to_json(), "group": group} for group, record in sorted(self.optimizers.items())]
        names = names_by_group(optimizers)
        points = [] if self.curve is None else self.curve.points()
        return {
            "schema": SCHEMA,
            "steps": self.steps,
            "skipped": sum(len(record.skipped) for record in self.optimizers.values()),
            "optimizers": optimizers,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
            "sampled_steps": self.steps_sampled,
            "ops": [{"op": op, "dtype": dtype, "count": count} for (op, dtype), count in self.ops.most_common()],
            "meters": [record.to_json() for record in self.meters.values()],
            "losses": [(step, loss) for step, loss, _ in points],
            "losses_of": [None if group is None else names[group] for _, _, group in points],
            "notes": list(self.notes),
            "scaled": list(self.scaled),
        }
