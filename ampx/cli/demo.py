"""`ampx demo` without any framework: the runs, the contract `Demo` of a backend's trainer, and the report."""

from __future__ import annotations

import abc
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import ampx
from ampx.backend import Backend, Contract
from ampx.errors import InvalidOptionError, PrecisionWarning, UnsupportedDtypeError
from ampx.events import Event, ScaleChanged, StepSkipped
from ampx.policy import Dtype, normalise_dtype
from ampx.scale_state import LossScale
from ampx.session import Amp

SCHEMA = "ampx.demo/1"
TEST_IMAGES = 450  # of 1797
# The default interval of 2000 finite steps is longer than a run: growth would never be seen.
DEMO_SCALE = LossScale(growth_interval=200)
SCALED = "float32, scaled"
LEARNING_RATE = 1e-2  # of the first epoch; a cosine leads to 0


class Digits(NamedTuple):
    """Scikit-learn's handwritten digits as NumPy arrays, split for good.

    Attributes:
        train_images: float32 in [0, 1], shape (1347, 1, 8, 8).
        train_labels: int64, shape (1347,).
        test_images: float32, shape (450, 1, 8, 8).
        test_labels: int64, shape (450,).
    """

    train_images: Any
    train_labels: Any
    test_images: Any
    test_labels: Any


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        dtype: Compute dtype; float32 runs the same script with `ampx.init(enabled=False)`.
        seed: Seed of the parameters and of the order of the batches.
        epochs: Passes over the training images.
        batch_size: Images a step; an incomplete last batch is left out.
        overflow_at: Step, counted from 0, whose loss is made infinite before backward; None: never.
        loss_scale: What `wrap_optimizer` gets; None for the default of the dtype. float32 with a loss scale computes
            in float32 and scales for real: it is planned where the device has no low-precision dtype.
    """

    dtype: Dtype
    seed: int
    epochs: int
    batch_size: int
    overflow_at: int | None = None
    loss_scale: LossScale | None = None

    @property
    def label(self) -> str:
        """Name of the run in tables and pictures."""
        return SCALED if self.dtype == "float32" and self.loss_scale is not None else self.dtype


@dataclass(frozen=True)
class RunResult:
    """What one run gave; plain types only.

    Attributes:
        dtype: Compute dtype.
        seed: The run's seed.
        device: Where it was computed.
        native: The device computes the dtype in hardware.
        reason: Why, as `amp.effective` tells it.
        accuracy: Share of the test images told right, in [0, 1].
        final_loss: Mean training loss of the last epoch, unscaled.
        seconds: Wall-clock time of the steps, without the first, which warms up.
        steps_per_second: The median of the epochs, so that a moment of a busy machine does not decide.
        losses: Training loss by step, unscaled.
        scales: Loss scale by step, as the step's gradients carried it.
        skipped: Steps that were skipped, counted from 0.
        final_scale: Loss scale after the last step.
    """

    dtype: str
    seed: int
    device: str
    native: bool
    reason: str
    accuracy: float
    final_loss: float
    seconds: float
    steps_per_second: float
    losses: list[float]
    scales: list[float]
    skipped: list[int]
    final_scale: float


class Demo(Contract):
    """What `ampx demo` needs of a framework: a small convolutional network and how to train it."""

    name: ClassVar[str] = "demo"
    feature: ClassVar[str] = "ampx demo"

    @abc.abstractmethod
    def train(self, data: Digits, run: Run, on_step: Callable[[], None]) -> RunResult:
        """Train through the public API of ampx and test.

        Args:
            data: The digits.
            run: What to do.
            on_step: Call it after every step; it is cheap.

        Sync: only what training itself needs, so that the time is honest.
        """


def load_digits() -> Digits:
    """Return the data set bundled with scikit-learn; nothing is downloaded."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    bunch = load()
    images = (bunch.images[:, None] / 16).astype("float32")
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, bunch.target.astype("int64"), test_size=TEST_IMAGES, random_state=0, stratify=bunch.target
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def choose_dtypes(backend: Backend, asked: Sequence[str] = ()) -> list[Dtype]:
    """List the dtypes to train in, float32 first."""
    device = backend.device("auto")
    can = device.native | device.emulated
    chosen = dict.fromkeys(normalise_dtype(dtype) for dtype in asked)
    for dtype in chosen:
        if dtype != "float32" and dtype not in can:
            raise UnsupportedDtypeError(
                f"dtype={dtype!r} is not computed by backend {backend.name!r} on {device.name!r}; accepted: "
                f"{', '.join(sorted(can)) or 'none: only float32'}. Pass one of these, or leave --dtype out."
            )
    low = list(chosen) or [dtype for dtype in ("float16", "bfloat16") if dtype in can]
    return ["float32", *(dtype for dtype in low if dtype != "float32")]


def casts_nothing(backend: Backend) -> bool:
    """Return whether the backend's best device computes no low-precision dtype: only scaling is left."""
    device = backend.device("auto")
    return not device.native | device.emulated


def plan_runs(
    dtypes: Iterable[Dtype],
    seeds: Iterable[int],
    epochs: int,
    batch_size: int,
    images: int,
    scaled: bool = False,
) -> list[Run]:
    """List the runs: every dtype with every seed, with one overflow injected on the way.

    The float32 run is spared the overflow: with `enabled=False` nothing would keep it out of the weights.

    Args:
        dtypes: The compute dtypes.
        seeds: The seeds; each once.
        epochs: Passes over the training images.
        batch_size: Images a step.
        images: How many training images there are.
        scaled: Add a float32 run whose loss is scaled. It gets no overflow, so that every number equals those of the
            plain run: scales are powers of two.

    Raises:
        InvalidOptionError: There would be no run, or no step.
    """
    steps = epochs * (images // batch_size) if batch_size > 0 else 0
    chosen = list(dict.fromkeys(seeds))
    if steps < 2 or not chosen:
        raise InvalidOptionError(
            f"epochs={epochs}, batch size {batch_size} and seeds {chosen} give no run of at least 2 steps; accepted: "
            f"at least one epoch and one seed, and a batch size from 1 to {images}. Correct these."
        )
    runs = []
    for seed in chosen:
        for dtype in dtypes:
            overflow_at = None if dtype == "float32" else max(1, steps * 2 // 5)
            scale = DEMO_SCALE if dtype == "float16" else None
            runs.append(Run(dtype, seed, epochs, batch_size, overflow_at, scale))
        if scaled:
            runs.append(Run("float32", seed, epochs, batch_size, loss_scale=DEMO_SCALE))
    return runs


def train_all(
    trainer: Demo, data: Digits, runs: Iterable[Run], on_start: Callable[[Run], Callable[[], None]]
) -> Iterator[tuple[RunResult, list[str]]]:
    """Train one run after the other.

    Sync: as the trainer.
    """
    for run in runs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PrecisionWarning)
            result = trainer.train(data, run, on_start(run))
        yield result, [str(warning.message) for warning in caught if issubclass(warning.category, PrecisionWarning)]


def report(framework: str, runs: Sequence[Run], results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the machine-readable report."""
    return {
        "schema": SCHEMA,
        "ampx": ampx.__version__,
        "python": platform.python_version(),
        "framework": framework,
        "epochs": runs[0].epochs,
        "batch_size": runs[0].batch_size,
        "overflow_at": max((run.overflow_at for run in runs if run.overflow_at is not None), default=None),
        "runs": [{"label": run.label, **asdict(result)} for run, result in zip(runs, results, strict=True)],
    }


def write(folder: Path, results: dict[str, Any]) -> None:
    """Write results.json and demo.png to a folder that exists."""
    from .plot import draw

    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, folder / "demo.png")


def plain_run(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the float32 run of the same seed; None where there is none."""
    return next((other for other in runs if other["label"] == "float32" and other["seed"] == run["seed"]), None)


def equals_float32(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether every loss and the accuracy are exactly those of the float32 run."""
    plain = plain_run(run, runs)
    return plain is not None and (run["losses"], run["accuracy"]) == (plain["losses"], plain["accuracy"])


class History(NamedTuple):
    """What the loss scale did in a run: its value by step, the steps that were skipped, its value at the end."""

    scales: list[float]
    skipped: list[int]
    final_scale: float


class DigitsTrainer(Demo):
    """A `Demo` that has the loop; a backend's demo derives from it and says what its framework calls the parts.

    Attributes:
        framework: Name of the backend.
        optimizer: The wrapped optimizer, which `start` makes.
        events: What `amp.on_event` told in this run.
    """

    framework: ClassVar[str]
    optimizer: Any
    events: list[Event]

    def train(self, data: Digits, run: Run, on_step: Callable[[], None]) -> RunResult:
        """Train and test; see `Demo`.

        Sync: one after the first step, which warms up, and one after each epoch; at each step the optimizer's own.
        """
        enabled = run.dtype != "float32" or run.loss_scale is not None
        with self.set_up(run.seed), ampx.init(self.framework, dtype=run.dtype, enabled=enabled) as amp:
            self.events = []
            amp.on_event(self.events.append)
            self.start(data, run, amp)
            losses, marks = self._train(len(data.train_images), run, on_step)
            trace = [self.number(loss) for loss in losses]
            history = self.history(len(trace))
            speeds = [(done - first) / (end - start) for (first, start), (done, end) in pairwise(marks) if done > first]
            last_epoch = trace[-(len(trace) // run.epochs) :]
            return RunResult(
                dtype=run.dtype,
                seed=run.seed,
                device=amp.effective.device,
                native=run.dtype == "float32" or amp.effective.native,
                reason=amp.effective.reason,
                accuracy=self.accuracy(),
                final_loss=sum(last_epoch) / len(last_epoch),
                seconds=marks[-1][1] - marks[0][1],
                steps_per_second=statistics.median(speeds),
                losses=trace,
                scales=history.scales,
                skipped=history.skipped,
                final_scale=history.final_scale,
            )

    def _train(self, images: int, run: Run, on_step: Callable[[], None]) -> tuple[list[Any], list[tuple[int, float]]]:
        """Return the losses, and after the first step and each epoch the steps done and the time in seconds."""
        losses: list[Any] = []
        marks: list[tuple[int, float]] = []
        shuffle = self.shuffle(images, run.seed)
        for epoch in range(run.epochs):
            self.set_learning_rate(LEARNING_RATE * (1 + math.cos(math.pi * epoch / run.epochs)) / 2)
            order = shuffle()
            for start in range(0, images - run.batch_size + 1, run.batch_size):
                factor = math.inf if len(losses) == run.overflow_at else 1.0
                losses.append(self.step(order[start : start + run.batch_size], factor))
                on_step()
                if len(losses) == 1:
                    marks.append((len(losses), self._now(losses[-1])))
            marks.append((len(losses), self._now(losses[-1])))
        return losses, marks

    def _now(self, loss: Any) -> float:
        self.number(loss)  # waits for the device
        return time.perf_counter()

    def number(self, loss: Any) -> float:
        """Read a loss. Sync: one."""
        return float(loss)

    def set_up(self, seed: int) -> AbstractContextManager[None]:
        """Return a region outside of which the framework is as it was; random numbers in it begin with the seed."""
        return nullcontext()

    def shuffle(self, images: int, seed: int) -> Callable[[], Any]:
        """Return a function that gives the order of the images in an epoch."""
        import numpy as np

        random = np.random.default_rng(seed)
        return lambda: random.permutation(images)

    @abc.abstractmethod
    def start(self, data: Digits, run: Run, amp: Amp) -> None:
        """Make the network and wrap its optimizer, and put the data where they train."""

    @abc.abstractmethod
    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the epoch that begins."""

    @abc.abstractmethod
    def step(self, rows: Any, factor: float) -> Any:
        """Train one step on some images, with the loss times a factor; return the loss without it, on the device."""

    @abc.abstractmethod
    def accuracy(self) -> float:
        """Return the share of the test images told right."""

    def history(self, steps: int) -> History:
        """Return what the loss scale did, as events tell it without a sync at each step.

        A change holds from the step after its event's.
        """
        final_scale = self.optimizer.loss_scale  # sends the events still due
        changes = [event for event in self.events if isinstance(event, ScaleChanged)]
        after = {event.step: event.next_scale for event in changes}
        scales = [changes[0].scale if changes else final_scale]
        for step in range(1, steps):
            scales.append(after.get(step, scales[-1]))
        return History(scales, [event.step - 1 for event in self.events if isinstance(event, StepSkipped)], final_scale)
