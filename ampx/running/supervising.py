"""Run a program with every framework automated that it imports."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ampx.errors import AmpxError, RunRefusedError, UnsupportedByBackendError
from ampx.registry import default_registry

from .importing import ImportWatch
from .program import Program, run_program
from .recorder import Recorder
from .run import Run, RunSettings


@dataclass
class Finished:
    """How a supervised program ended.

    Attributes:
        run: The framework that trained; None where no optimizer was made.
        runs: Every framework that was automated.
        recorder: What was seen.
        error: What the program ended with, or None.
        refusal: Why it was refused, or None.
        effective: What the session really did, for reports.
    """

    recorder: Recorder
    runs: list[Run] = field(default_factory=list)
    run: Run | None = None
    error: BaseException | None = None
    refusal: RunRefusedError | None = None
    effective: Any = None

    def explain(self) -> tuple[str, ...]:
        """Give the lines that do the same by hand; none where the program failed before its first step. Sync: none."""
        ended = isinstance(self.error, SystemExit) and not self.error.code
        failed = self.error is not None and not ended
        if self.run is None or (failed and self.recorder.steps == 0):
            return ()
        return self.run.explain()


def supervise(program: Program, settings: RunSettings, framework: str | None = None) -> Finished:
    """Run a program to its end.

    Args:
        program: What to run.
        settings: What the user asked for.
        framework: The only framework to automate, which is imported before the program; None for those that the
            program imports and trains with.

    Returns:
        How it ended. The frameworks are as they were.

    Raises:
        AmpxError: There is no such program; or the framework that was named cannot be automated.

    Sync: none of its own.
    """
    registry = default_registry()
    finished = Finished(Recorder())
    names = registry.names() if framework is None else [framework]
    registrations = {name: registry.registration(name) for name in names}
    if settings.stand_ins_only:
        registrations = {name: one for name, one in registrations.items() if one.stands_in_for}
    with ExitStack() as regions:

        def automate(name: str) -> None:
            run = Run(name, settings, finished.recorder, finished.runs)
            try:
                regions.enter_context(registry.load(name).automate(run))
            except UnsupportedByBackendError:
                if framework is not None:
                    raise
                finished.runs.remove(run)
                finished.recorder.notes.append(f"The script imports {name}, which `ampx run` cannot automate.")
            except RunRefusedError:
                raise
            except AmpxError as error:
                if framework is not None:
                    raise
                run.refuse(f"the script imports {name}, which cannot be automated: {error}".rstrip("."))

        watch = ImportWatch(
            {root: name for name, one in registrations.items() for root in one.roots},
            automate,
            {module: one.roots[0] for one in registrations.values() for module in one.stands_in_for},
        )
        if framework is not None:
            registry.load(framework)
        regions.enter_context(watch.installed())
        watch.look()
        try:
            finished.error = run_program(program)
        finally:
            for run in finished.runs:
                if run.amp is not None or run.stood_down:
                    finished.run = run
                    finished.effective = None if run.amp is None else run.amp.effective
    refusals = [run.refusal for run in finished.runs if run.refusal is not None]
    if isinstance(finished.error, RunRefusedError):
        refusals.insert(0, finished.error)
    finished.refusal = refusals[0] if refusals else None
    return finished
