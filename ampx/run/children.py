"""Follow a program into the processes that it starts by multiprocessing: they train as it would.

A child of `fork` is a copy, automation included. To those of `spawn` and `forkserver` an import is handed over, which
automates the frameworks that the child imports. Each child that has something to tell leaves a report in a folder.
A program that starts itself again, as Lightning does for every device but the first, is run the same way.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.spawn
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from ampx.errors import PrecisionWarning

if TYPE_CHECKING:
    from .program import Program
    from .run import RunSettings
    from .supervisor import Finished

# Read by the fork server, which takes no other message.
VARIABLE: Final = "AMPX_RUN_CHILDREN"
_PRELOADED: Final = "ampx.run.preloaded"
_AGAIN_SECONDS: Final = 60.0  # so long a program waits at its end for those that it started of itself
_LAUNCHERS: Final = ("python", "torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun")


@contextmanager
def followed(finished: Finished, program: Program, settings: RunSettings, framework: str | None) -> Iterator[None]:
    """Automate the processes that multiprocessing starts inside; afterwards their reports are in `finished`."""
    finished.folder = tempfile.mkdtemp(prefix="ampx-run-")
    message = json.dumps({"settings": asdict(settings), "framework": framework, "folder": finished.folder})
    own = os.getpid()
    try:
        with handed_on(finished, message), _programs_followed(finished, program):
            yield
    finally:
        if os.getpid() == own:  # else a copy that the script made by os.fork
            gather(finished)


def gather(finished: Finished) -> None:
    """Read the reports of the children, and remove their folder."""
    reports = [json.loads(path.read_text()) for path in Path(finished.folder).glob("*.json")]
    finished.children = sorted(reports, key=lambda report: (len(report["process"]), report["process"]))
    shutil.rmtree(finished.folder, ignore_errors=True)


@contextmanager
def handed_on(finished: Finished, message: str) -> Iterator[None]:
    """Patch how multiprocessing starts processes, and what they do at their end."""
    command_line = multiprocessing.spawn.get_command_line
    ensure_running = multiprocessing.forkserver.ForkServer.ensure_running
    bootstrap = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]
    own = os.getpid()

    def command_line_through_ampx(**options: Any) -> list[str]:
        command = command_line(**options)
        if "-c" in command:
            at = command.index("-c") + 1
            command[at] = f"import {_PRELOADED}; {command[at]}"
        return command

    def ensure_running_through_ampx(self: Any) -> None:
        if _PRELOADED not in self._preload_modules:
            self._preload_modules = [_PRELOADED, *self._preload_modules]
        ensure_running(self)

    def bootstrap_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() != own:
            finished.begin_child()
        if self._identity[-1:] != (1,):
            warnings.simplefilter("ignore", PrecisionWarning)  # the first child says it for all
        try:
            return bootstrap(self, *args, **kwargs)
        finally:
            leave_report(finished, self.name)

    with ExitStack() as patches:
        for owner, name, patched in (
            (multiprocessing.spawn, "get_command_line", command_line_through_ampx),
            (multiprocessing.forkserver.ForkServer, "ensure_running", ensure_running_through_ampx),
            (multiprocessing.process.BaseProcess, "_bootstrap", bootstrap_and_report),
        ):
            patches.enter_context(mock.patch.object(owner, name, patched))
        patches.enter_context(mock.patch.dict(os.environ, {VARIABLE: message}))
        yield


def leave_report(finished: Finished, name: str) -> None:
    """Leave a report, where the process trained or was refused."""
    finished.close()
    if finished.recorder.steps or finished.refusal or finished.misuse:
        refusal = finished.refusal or str(finished.misuse or "")
        report = {**finished.to_json(), "process": name, "refusal": refusal}
        with suppress(OSError):  # the parent is gone, and its folder with it
            Path(finished.folder, f"{os.getpid()}.json").write_text(json.dumps(report))


@contextmanager
def _programs_followed(finished: Finished, program: Program) -> Iterator[None]:
    """Automate the program itself where it starts itself again, and note other Python programs, which nothing does."""
    true = subprocess.Popen.__init__
    again: list[subprocess.Popen[Any]] = []
    own = os.getpid()

    @functools.wraps(true)
    def start(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if not isinstance(args, (str, bytes, os.PathLike)) and _is_again([str(word) for word in args], program):
            executable, *words = args
            true(self, [executable, "-m", _PRELOADED, *words], *rest, **options)
            again.append(self)
            return
        true(self, args, *rest, **options)
        words = (
            args.split()
            if isinstance(args, str)
            else [str(word) for word in args]
            if isinstance(args, (list, tuple))
            else []
        )
        script = next((word for word in words if word.endswith(".py")), None)
        if script is not None and Path(words[0]).name.startswith(_LAUNCHERS):
            finished.recorder.note(
                f"The script started {script} as a program of its own, which this run did not automate. Start that by "
                f"ampx run."
            )

    with mock.patch.object(subprocess.Popen, "__init__", start):
        yield
    if os.getpid() == own:
        for process in again:  # their reports belong to this run
            with suppress(subprocess.TimeoutExpired):
                process.wait(_AGAIN_SECONDS)


def _is_again(words: Sequence[str], program: Program) -> bool:
    """Return whether a command line starts the program once more, with the same arguments."""
    if len(words) < 3 - (not program.is_module) or words[0] != sys.executable:
        return False
    if program.is_module:
        names = (program.name, f"{program.name}.__main__")
        return words[1] == "-m" and words[2] in names and [*words[3:]] == [*program.arguments]
    if program.name == "-" or [*words[2:]] != [*program.arguments]:
        return False
    return os.path.realpath(words[1]) == os.path.realpath(program.name)
