"""Run a program with every framework automated that it imports."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from ampx.backend import find_offer, offer
from ampx.errors import AmpxError, InvalidOptionError, PrecisionWarning, RunRefusedError, UnsupportedByBackendError
from ampx.plugins import default_registry
from ampx.policy import find_level, normalise_dtype
from ampx.session import check_settings

from . import children
from .imports import ImportWatch
from .program import Program, run_program
from .ranks import process_rank
from .recorder import Recorder
from .run import Automation, Run, RunSettings

_DEVICE: Final = re.compile(r"[a-z]+(:\d+)?")


@dataclass
class Finished:
    """How a supervised program goes, and how it ended."""

    recorder: Recorder = field(default_factory=Recorder)  # what was seen
    runs: list[Run] = field(default_factory=list)  # every framework that was automated
    run: Run | None = None  # the framework that trained; None where no optimizer was made
    error: BaseException | None = None  # what the program ended with, or None
    refusal: str = ""  # why it was refused, or None
    misuse: InvalidOptionError | None = None  # which option cannot be honoured, or None
    effective: Any = None  # what the session really did, for reports
    # The reports of the processes that the program started by multiprocessing.
    children: list[dict[str, Any]] = field(default_factory=list)
    folder: str = ""  # where these leave them

    def settle(self) -> None:
        """Find out which framework trained, and what was refused, as far as the program has come."""
        for run in self.runs:
            run.look()
            if run.amp is not None or run.stood_down:
                self.run = run
                self.effective = run.effective or (None if run.amp is None else run.amp.effective)
            self.misuse = self.misuse or run.misuse
        if isinstance(self.error, RunRefusedError):
            self.refusal = str(self.error)
        refusals = [str(run.refusal or "") for run in self.runs] + [child["refusal"] for child in self.children]
        self.refusal = self.refusal or next(filter(None, refusals), "")

    def begin_child(self) -> None:
        """Forget what the parent process did, in a copy of it."""
        self.recorder.begin_child()
        for run in self.runs:
            run.begin_child()

    def close(self) -> None:
        """End the runs, in a process whose regions are never left. Sync: as `Amp.shutdown`."""
        for run in self.runs:
            run.close()
        self.settle()

    @property
    def failed(self) -> bool:
        """Whether the program ended by an exception, or with an exit code that is not 0."""
        return self.error is not None and not (isinstance(self.error, SystemExit) and not self.error.code)

    def explain(self) -> tuple[str, ...]:
        """Return the lines that do the same by hand; none where the program failed before its first step."""
        if self.run is None or (self.failed and self.recorder.steps == 0):
            return ()
        return self.run.explain()

    def to_json(self) -> dict[str, Any]:
        """Return what was seen of this process as plain JSON types."""
        effective = self.effective
        return {
            **self.recorder.to_json(),
            "framework": None if self.run is None else self.run.framework,
            "by_itself": None if self.run is None else self.run.stood_down or None,
            "device": None if effective is None else effective.device,
            "dtype": None if effective is None else effective.dtype or "float32",
            "level": None if effective is None else effective.level,
            "reason": None if effective is None else effective.reason,
            "lines": list(self.explain()),
        }


def supervise(
    program: Program, settings: RunSettings, framework: str | None = None, finished: Finished | None = None
) -> Finished:
    """Run a program to its end, and return how it ended; the frameworks are as they were.

    A framework that is named is imported first; without one, those are automated that the program imports and
    trains with. Who wants to look before the end passes what is written to as `finished`.

    Raises:
        AmpxError: There is no such program; a setting is none; or the framework that was named cannot be automated.
    """
    finished = finished or Finished()
    _judge(settings)
    with children.followed(finished, program, settings, framework), automated(finished, settings, framework):
        try:
            finished.error = run_program(program)
        finally:
            finished.settle()
    finished.settle()
    return finished


@contextmanager
def automated(finished: Finished, settings: RunSettings, framework: str | None) -> Iterator[None]:
    """Automate the frameworks that are imported inside."""
    registry = default_registry()
    names = registry.names() if framework is None else [framework]
    registrations = {name: registry.registration(name) for name in names}
    stand_ins = {
        module: name for name in registrations for stand_in in registry.stand_ins(name) for module in stand_in.missing
    }
    if not settings.automates:
        registrations = {name: registrations[name] for name in registrations if name in stand_ins.values()}
    load = registry.load
    with ExitStack() as regions:
        if process_rank()[0]:
            regions.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", PrecisionWarning)  # the first process says it for all

        def automate(name: str) -> None:
            run = Run(name, settings, finished.recorder, finished.runs)
            try:
                backend = load(name)
                if settings.automates:
                    _check(run, backend)
                regions.enter_context(offer(backend, Automation).automate(run))
                if finished.recorder.observer is not None:
                    regions.enter_context(finished.recorder.observer.observing(run, backend))
            except AmpxError as error:
                if framework is not None or isinstance(error, (RunRefusedError, InvalidOptionError)):
                    raise
                if not isinstance(error, UnsupportedByBackendError):
                    run.refuse(f"the script imports {name}, which cannot be automated: {error}".rstrip("."))
                finished.runs.remove(run)
                finished.recorder.notes.append(f"The script imports {name}, which `ampx run` cannot automate.")

        watch = ImportWatch(
            {root: name for name, registration in registrations.items() for root in registration.roots},
            automate,
            {module: registrations[name].roots[0] for module, name in stand_ins.items()},
        )

        def load_completely(name: str) -> Any:
            """A backend imports its framework, whose automation needs the backend: that waits until it is there."""
            with watch.importing():
                backend = load(name)
            watch.look()
            return backend

        if framework is not None:
            load(framework)
        regions.enter_context(mock.patch.object(registry, "load", load_completely))
        regions.enter_context(watch.installed())
        watch.look()
        yield


def _judge(settings: RunSettings) -> None:
    """Raise where an option is none, whatever the framework."""
    try:
        find_level(settings.level)
        if settings.dtype != "auto":
            normalise_dtype(settings.dtype)
    except AmpxError as error:
        raise InvalidOptionError(f"the options cannot be honoured: {error}") from error
    if _DEVICE.fullmatch(settings.device) is None:
        raise InvalidOptionError(
            f"--device {settings.device!r} is no name of a device; accepted: auto, or a kind such as cpu, cuda or gpu, "
            f"with a number if wanted, such as cuda:1. Correct it."
        )


def _check(run: Run, backend: Any) -> None:
    """Reject settings that this framework cannot honour, before the script goes on."""
    settings = run.settings
    if find_offer(backend, Automation) is None:
        return  # `offer` says so
    try:
        check_settings(backend, settings.dtype, settings.level, settings.device)
    except AmpxError as error:
        run.reject(error)
