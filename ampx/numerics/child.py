"""The process that runs a script for a `Trial`: seeds, watches, ends it in time, and writes what was seen.

With the name of a file it runs what that asks for. Without, it is a template of such processes.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import pickle
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ampx
from ampx.backend import find_offer, offer
from ampx.callers import script_line_of
from ampx.errors import AmpxError
from ampx.events import Event, ScaleCollapsed
from ampx.plugins import default_registry
from ampx.run.page import framework_versions
from ampx.run.ranks import process_rank
from ampx.run.recorder import names_by_group
from ampx.run.supervisor import Finished, supervise

from .batch import in_one_line
from .probe import Probe
from .template import Imported, environment, modules_of
from .trial import COMPILED, MISUSED, REFUSED, Outcome, Trial

if TYPE_CHECKING:
    from ampx.backend import Backend
    from ampx.run import Run, SampledGradient

    from .probe import Reading, Watch


# Drivers of accelerators: a process that has one open cannot be copied.
_DEVICES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")


class TrialEnded(SystemExit):
    """Ends a script after its last step: no `except Exception` catches it, and what is to run at the end runs."""

    def __init__(self) -> None:
        super().__init__(0)


class TrialObserver:
    """Looks on while the script trains: see `ampx.run.recorder.Observer`.

    Losses are read together at the end of a block of steps, so that a device can run ahead as it does without us.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.steps = 0
        self.losses: list[float | None] = []
        self.turns: list[int | None] = []  # by step, the group of the optimizer that made it
        self.rates: list[tuple[float, ...]] = []  # by step
        self.times: list[float] = []
        self.readings: dict[int, tuple[Reading, ...]] = {}
        self.gradients: dict[int, tuple[SampledGradient, ...]] = {}
        self.fault: tuple[int, str] | None = None
        self.ended_early = False
        self.notes: list[str] = []
        self.mistakes: list[str] = []
        self.peak_device: int | None = None
        self.versions = {"python": platform.python_version(), "ampx": ampx.__version__}
        self._environments: dict[str, frozenset[tuple[str, str]]] = {}  # by framework, when it had been imported
        self._readers: list[Callable[[], float]] = []
        self._unread: list[list[Callable[[], float]]] = []  # a list for each step of the block
        self._block_began = 0.0
        self._watching = ExitStack()  # what is to end with the step
        self._watches: list[Watch] = []
        self._runs: list[tuple[Run, Backend]] = []
        self._heard: list[Any] = []  # sessions
        self._collapsed = False
        self._over = False
        self._process = os.getpid()

    def seed(self) -> None:
        """Seed Python's random numbers and NumPy's; the framework follows when it is imported."""
        random.seed(self.trial.seed)
        with suppress(ImportError):
            import numpy

            numpy.random.seed(self.trial.seed)

    @contextmanager
    def observing(self, run: Run, backend: Backend) -> Iterator[None]:
        """Seed a framework that the script has just imported, and look at it until it is automated no more."""
        probe = find_offer(backend, Probe)
        self._environments[run.framework] = environment()
        if probe is not None:
            probe.seed(self.trial.seed)
        with ExitStack() as regions:
            if self.trial.forced:
                regions.enter_context(offer(backend, Probe).force(None, self.trial.forced))
            self._runs.append((run, backend))
            self._sample(run, 1)
            if 1 in self.trial.watched:
                self._watch(backend, 1)
            try:
                yield
            finally:
                self._over = True
                self._finish_block()
                self._leave(self.steps + 1)
                if run.amp is not None or run.stood_down:
                    self.peak_device = None if probe is None else probe.peak_memory()
                    self.versions.update(framework_versions(run.framework))

    def loss(self, read: Callable[[], float]) -> None:
        """Note the loss of a backward."""
        if os.getpid() == self._process:
            self._readers.append(read)

    def stepped(self, steps: int) -> None:
        """Note that steps are over; end the script after the last."""
        if steps <= self.steps or os.getpid() != self._process:
            return
        recorder = next((run.recorder for run, _ in self._runs), None)
        turn = None if recorder is None else recorder.turn
        rates = () if recorder is None or turn is None else recorder.learning_rates(turn)
        for _ in range(steps - self.steps):
            self.turns.append(turn)
            self.rates.append(rates)
            self._unread.append(self._readers)
            self._readers = []
        before, self.steps = self.steps, steps
        if not self._over:  # else outcomes of a device that arrive when the script has ended
            self._begin_next(before)

    def _begin_next(self, before: int) -> None:
        """End what belongs to the last step, which is `self.steps`, and begin the next or end the script."""
        trial, steps = self.trial, self.steps
        warm = before < trial.warm_up <= steps
        over = trial.steps is not None and steps >= trial.steps
        if warm or over or (steps > trial.warm_up and len(self._unread) >= trial.block):
            self._finish_block()
        self._leave(steps)
        for run, _ in self._runs:
            if run.amp is not None and run.amp not in self._heard:
                self._heard.append(run.amp)
                run.amp.on_event(self._hear)
        if over or (trial.stop_at_fault and self._at_fault()):
            self._over = self.ended_early = True
            raise TrialEnded
        self._prepare(steps + 1)

    def _hear(self, event: Event) -> None:
        self._collapsed = self._collapsed or isinstance(event, ScaleCollapsed)

    def _finish_block(self) -> None:
        """Read the losses of the block, which waits for the device, and time it."""
        block, self._unread = self._unread, []
        if not block:
            return
        self.losses += [self._read(readers) for readers in block]
        now = time.perf_counter()
        began = len(self.losses) - len(block)
        if began and began >= self.trial.warm_up:
            self.times.append((now - self._block_began) / len(block))
        self._block_began = now

    def _read(self, readers: list[Callable[[], float]]) -> float | None:
        if not readers:
            return None
        try:
            return sum(float(read()) for read in readers)
        except Exception as error:  # a tensor that the framework has freed, say; the script's training goes on
            self.note(f"A loss could not be read: {type(error).__name__}: {error}")
            return None

    def mistake(self, sentence: str) -> None:
        """Note what the script itself does wrong, once."""
        if sentence not in self.mistakes:
            self.mistakes.append(sentence)

    def note(self, sentence: str) -> None:
        """Note what could not be observed, or what observing has changed, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _at_fault(self) -> bool:
        loss = self.losses[-1] if self.losses else None
        if loss is not None and not math.isfinite(loss):
            self.fault = self.steps, "loss"
        elif self._collapsed:
            self.fault = self.steps, "scale"
        elif any(record.skips_unscaled for run, _ in self._runs for record in run.recorder.optimizers.values()):
            self.fault = self.steps, "skipped"
        return self.fault is not None

    # -- what holds for one step -------------------------------------------------------------------

    def _prepare(self, step: int) -> None:
        """Watch the next step, or switch casting off for it, where that is asked for."""
        for run, backend in self._runs:
            self._sample(run, step)
            run.float32 = step in self.trial.float32  # for regions of the script's own
            if run.amp is None and not run.stood_down:
                continue
            if run.float32 and run.amp is not None and run.amp.casting is not None:
                self._watching.enter_context(backend.autocast(run.amp.casting, False))
            if step in self.trial.watched:
                self._watch(backend, step)

    def _sample(self, run: Run, step: int) -> None:
        """Have the gradients of a step sampled, where that is asked for."""

        def take(sampled: Iterable[SampledGradient]) -> None:
            if os.getpid() == self._process:
                self.gradients[step] = (*self.gradients.get(step, ()), *map(_plain, sampled))

        run.recorder.takes_gradients = take if step in self.trial.gradients else None

    def _watch(self, backend: Backend, step: int) -> None:
        """Watch a step, operations in few of those that are watched: they cost most."""
        probe = find_offer(backend, Probe)
        if probe is not None:
            watching = self.trial.watching
            operations = watching.operations and step in (self.trial.operations_in or (max(self.trial.watched),))
            times = watching.times and not probe.watches_uncompiled
            watching = replace(watching, operations=operations, times=times)
            self._watches.append(self._watching.enter_context(probe.watch(None, watching)))
        else:
            self.note(f"Modules of {backend.name} cannot be watched.")

    def _leave(self, step: int) -> None:
        if self._watches:
            self.readings[step] = tuple(reading for watch in self._watches for reading in watch.readings())
            self._watches = []
        self._watching.close()

    # -- the end -----------------------------------------------------------------------------------

    def outcome(self, report: dict[str, Any], error: BaseException | None = None) -> Outcome:
        """Return what was seen, and what the script raised."""
        self._finish_block()  # of steps that a device told of after the end
        if report["steps"] and all(loss is None for loss in self.losses):
            self.note("This backend does not report losses.")
        names = names_by_group(report["optimizers"])
        began = [(run.amp, backend) for run, backend in self._runs if run.amp is not None]
        native = {dtype for amp, backend in began for dtype in backend.device(amp.effective.device).native}
        return Outcome(
            run=report,
            losses=tuple(self.losses),
            losses_of=tuple(names.get(turn) for turn in self.turns),
            rates=tuple(self.rates),
            times=tuple(self.times),
            peak_host=_peak_host(),
            peak_device=self.peak_device,
            readings=self.readings,
            gradients=self.gradients,
            fault=self.fault,
            watches=any(find_offer(backend, Probe) is not None for _, backend in began),
            native=tuple(sorted(native)),
            prepare_finds_modules=any(backend.prepare_finds_modules for _, backend in began),
            ended_early=self.ended_early,
            notes=tuple(self.notes),
            mistakes=tuple(self.mistakes),
            versions=self.versions,
            raised=None if error is None else (in_one_line(error), script_line_of(error.__traceback__)),
            imported=self._imported(report["framework"]),
        )

    def _imported(self, framework: str | None) -> Imported | None:
        """Return what was imported of the framework that trained."""
        if framework not in self._environments:
            return None
        return Imported(framework, modules_of(framework), self._environments[framework])


def _plain(sampled: SampledGradient) -> SampledGradient:
    """Return it without types of the framework, which the process that asked does not import."""
    import numpy as np

    values = None if sampled.values is None else np.asarray(sampled.values, np.float32)
    return replace(sampled, shape=tuple(map(int, sampled.shape)), values=values)


def _peak_host() -> int | None:
    # Without files that are mapped: a copy of a process maps fewer pages of its libraries than a new process does. And
    # not by `getrusage`, where that is known: there the peak of a new process begins with that of its parent.
    with suppress(OSError, KeyError):
        held = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE))
        return 1024 * (int(held["VmHWM"]) - int(held["RssFile"]))
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(request: str) -> int:
    """Run what a file asks for; return the exit code."""
    trial, answer = pickle.loads(Path(request).read_bytes())
    finished = Finished()
    observer = finished.recorder.observer = TrialObserver(trial)
    observer.seed()
    if not (trial.watched or trial.shares_compiled):
        os.environ.pop(COMPILED, None)
    try:
        supervise(trial.program, trial.settings, trial.framework, finished)
    except AmpxError as reason:  # such as that there is no such program; what the script raised is not raised here
        sys.stderr.write(f"ampx: {reason}\n")
        return MISUSED
    for refusal, code in ((finished.misuse, MISUSED), (finished.refusal, REFUSED)):
        if refusal:
            sys.stderr.write(f"ampx: {refusal}\n")
            return code
    error = finished.error
    if isinstance(error, AmpxError):  # a rule of ampx, which no precision breaks
        place = script_line_of(error.__traceback__)
        sys.stderr.write(f"ampx: {place}: {error}\n" if place else f"ampx: {error}\n")
        return REFUSED
    raised = error if trial.may_raise and isinstance(error, Exception) and finished.run is not None else None
    ended_early = isinstance(error, SystemExit) and observer.ended_early
    if finished.failed and raised is None and not ended_early:
        return _show(error)
    if process_rank()[0] == 0:
        report = {
            **finished.to_json(),
            "script": trial.program.name,
            "arguments": list(trial.program.arguments),
            "processes": finished.children,
        }
        answer.write_bytes(pickle.dumps(observer.outcome(report, raised)))
    gc.freeze()  # else Python, while it ends, walks several times over all that the framework has made
    return 0


def _show(error: BaseException | None) -> int:
    """Show what ended the script as Python does; return the exit code."""
    if isinstance(error, SystemExit):
        raise error
    if error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


# -- a template: see `ampx.numerics.template` --------------------------------------------------------------------------


def serve() -> int:
    """Import what the first line of the standard input names, then run what each further line asks for in a copy."""
    with os.fdopen(os.dup(1), "w") as answers:
        _write_to(os.devnull)
        framework, modules = json.loads(sys.stdin.readline())
        default_registry().load(framework)
        variables = sorted(environment())
        for name in modules:
            with suppress(Exception):  # one that is no file, or that its framework has taken back
                importlib.import_module(name)
        _answer(answers, {"environment": variables, "uses_device": _uses_device()})
        gc.collect()
        gc.freeze()  # else a collection in a copy would write to all pages
        while line := sys.stdin.readline():
            request, output = json.loads(line)
            copy = os.fork()
            if copy == 0:
                break
            _answer(answers, copy)
            sys.stdin.readline()
            _, status = os.waitpid(copy, 0)
            _answer(answers, os.waitstatus_to_exitcode(status))
        else:
            return 0
    _write_to(output)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return main(request)


def _answer(answers: Any, answer: Any) -> None:
    answers.write(f"{json.dumps(answer)}\n")
    answers.flush()


def _write_to(target: str) -> None:
    with open(target, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _uses_device() -> bool:
    links = (os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd"))
    return any(os.readlink(link).startswith(_DEVICES) for link in links if os.path.lexists(link))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if sys.argv[1:] else serve())
