"""What `ampx run` was asked, and what it does between reading its options and ending as the script ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ampx.errors import InvalidOptionError, RunRefusedError
from ampx.events import LOG_EVERY
from ampx.rooms import parts_needed
from ampx.run import children
from ampx.run.ranks import process_rank
from ampx.run.supervisor import Finished, supervise

from .program import WRONG_OPTIONS, misplaced
from .recorder import LossCurve
from .report import summary_lines

if TYPE_CHECKING:
    from ampx.run import RunSettings
    from ampx.run.program import Program


@dataclass(frozen=True)
class RunRequest:
    """The options of `ampx run`."""

    program: Program
    settings: RunSettings
    framework: str | None = None  # the only framework to automate, or None
    report: Path | None = None  # where to write a report, or None
    unchanged_if_refused: bool = False  # run the script without ampx where it is refused
    log: tuple[str, ...] = ()  # where to write what steps report, as `ampx.log_to` takes it
    log_every: int = LOG_EVERY  # every so many steps
    as_json: bool = False  # print the report in place of the summary, in one line
    quiet: bool = False  # print no summary


REFUSED = 3


def check_report(report: Path | None, kinds: Sequence[str] = (".json", ".html")) -> None:
    """Check the target of `--report`, before the script has trained for hours."""
    if report is None:
        return
    if report.suffix not in kinds:
        raise InvalidOptionError(
            f"--report {str(report)!r} is of no known kind; accepted: a name that ends in {' or '.join(kinds)}. "
            f"Change it."
        )
    if report.suffix != ".json":
        import matplotlib.figure  # noqa: F401 -- a missing extra is told before the script runs
    check_writable("--report", report)


def check_writable(option: str, target: Path) -> None:
    """Check that a file can be written, and leave what is there as it is."""
    if not target.parent.is_dir():
        raise InvalidOptionError(
            f"{option} {str(target)!r} cannot be written: there is no folder {str(target.parent)!r}; accepted: a "
            f"file in a folder that exists. Make the folder."
        )
    existed = target.exists()
    try:
        target.open("a").close()
    except OSError as error:
        raise InvalidOptionError(
            f"{option} {str(target)!r} cannot be written: {error.strerror}; accepted: a file that you may write. "
            f"Choose another."
        ) from error
    if not existed:
        target.unlink(missing_ok=True)


def run_to_the_end(request: RunRequest) -> int:
    """Run a script, print the summary, and end as the script ended.

    Sync: none of its own.
    """
    stderr = sys.stderr  # the script may replace it
    finished, own = Finished(), os.getpid()
    if request.report is not None:
        request = replace(request, report=request.report.absolute())  # the script may change the folder
        finished.recorder.curve = LossCurve()
    with _logs(request, finished) as logs, _termination_handled(request, finished, logs):
        try:
            supervise(request.program, request.settings, request.framework, finished)
        except RunRefusedError as refusal:  # by a framework that was named: it is looked at before the script begins
            finished.refusal = str(refusal)
    if finished.misuse is not None:
        _flush(sys.stdout)
        raise finished.misuse
    if finished.refusal:
        return _end_refused(request, finished)
    error = _print_error(finished.error, request.program, stderr)
    _flush(sys.stdout)
    code = 1 if error is not None else 0
    if os.getpid() == own:  # else a copy that the script made by os.fork
        for line in _conclude(request, finished):
            stderr.write(f"{line}\n")
    _flush(stderr)
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt):
        _end_interrupted()
    return code


def _print_error(error: BaseException | None, program: Program, stderr: TextIO) -> BaseException | None:
    """Print what ended a script as Python does, before the summary; return what is left to be raised."""
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):  # a message, which Python would print last
            stderr.write(f"{error.code}\n")
            return SystemExit(1)
        if error.code == WRONG_OPTIONS and (hint := misplaced(program)):
            stderr.write(f"ampx run: {hint}\n")
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    return error


@contextmanager
def _logs(request: RunRequest, finished: Finished) -> Iterator[ExitStack]:
    """Write what steps report where `--log` says; of a job, the first process does. What closes the logs is given."""
    with ExitStack() as stack:
        targets = () if process_rank()[0] else request.log
        logs = []
        if targets:
            with parts_needed("--log"):
                from ampx.loggers.log import Log
            logs = [stack.enter_context(Log(target, request.log_every, None)) for target in targets]
        yield stack
    if logs and not any(log.rows for log in logs):
        children = f", and its {len(finished.children)} processes write no log" if finished.children else ""
        finished.recorder.note(
            f"--log {request.log[0]} is empty: ampx saw {finished.recorder.steps} steps in this process{children}. Log "
            f"more often with --log-every, or call ampx.log_to where the script trains."
        )


def _conclude(request: RunRequest, finished: Finished) -> list[str]:
    """Write the report, and return the lines of the summary: one process of a job prints it."""
    settings = request.settings
    if settings.stand_ins_only and settings.enabled and request.report is None:  # who started the script anew has told
        return []
    report = to_json(request, finished)
    rank, size = report["rank"], report["world_size"]
    written = [] if request.report is None else _write(request.report, report, request.as_json or request.quiet)
    if rank or (request.quiet and not request.as_json):
        return written
    if request.as_json:
        return [*written, json.dumps(with_origin(report))]
    lines = [*summary_lines(report, finished.failed), *written]
    low = report["dtype"] not in (None, "float32")
    failure = _failure(report, finished)
    if low and failure and request.program.name != "-":
        lines.append(
            f"  {'failed':<11} {failure}; whether {report['dtype']} is why, this says: "
            f"{shlex.join(_diagnosing(request, report['dtype']))}"
        )
    if request.report is not None and size > 1:
        lines.append(f"  {'reports':<11} {request.report}, and of the other processes {report_of(request.report, 1)} …")
    return lines


def _write(asked: Path, report: dict[str, Any], quiet: bool) -> list[str]:
    """Write the report of one process, and return the line that says where; a job of several has one line for all."""
    target = report_of(asked, report["rank"])
    try:
        write_report(target, report)
    except OSError as error:  # the script ends as it ended all the same
        return [f"  {'report':<11} {target} could not be written: {error.strerror}"]
    return [] if quiet or report["rank"] or report["world_size"] > 1 else [f"  {'report':<11} {target}"]


def _failure(report: dict[str, Any], finished: Finished) -> str:
    """Return how a script failed: by an exception, or by skipping half of its steps, as `ampx diagnose` counts."""
    if isinstance(finished.error, Exception):
        return f"by {type(finished.error).__name__}"
    steps, skipped = report["steps"], report["skipped"]
    return f"in {skipped} of {steps} steps, which were skipped" if skipped and 2 * skipped >= steps else ""


def _diagnosing(request: RunRequest, dtype: str) -> tuple[str, ...]:
    """Return the command that diagnoses the program as it was run."""
    program, settings = request.program, request.settings
    options = ["--dtype", dtype]
    if request.framework is not None:
        options += ["--framework", request.framework]
    if settings.replace_native:
        options.append("--replace-native")
    if program.is_module:
        options.append("-m")
    return ("ampx", "diagnose", *options, program.name, *program.arguments)


@contextmanager
def _termination_handled(request: RunRequest, finished: Finished, logs: ExitStack) -> Iterator[None]:
    """Write summary and report when the process receives SIGTERM, and end by that signal, as `python` does.

    A script that handles the signal itself goes on to do so.
    """
    on = False

    def end(number: int, frame: FrameType | None) -> None:
        finished.settle()
        children.gather(finished)
        logs.close()
        text = "".join(f"{line}\n" for line in _conclude(request, finished))
        os.write(2, text.encode())  # the signal may have come in the middle of a write to sys.stderr
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def before_fork() -> None:
        if on:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_parent() -> None:
        if on:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def in_child() -> None:  # it ends as it would without us, also where the signal comes while it is being made
        if on and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_parent()

    taken = threading.current_thread() is threading.main_thread()
    if taken and sys.platform != "win32" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
        signal.signal(signal.SIGTERM, end)
        on = True
    try:
        yield
    finally:
        if on and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        on = False


def _end_refused(request: RunRequest, finished: Finished) -> int:
    _flush(sys.stdout)
    message = f"ampx run: refused: {finished.refusal}"
    if request.program.name == "-":  # it is read already
        sys.stderr.write(f"{message}\n")
        return REFUSED
    if not request.unchanged_if_refused:
        sys.stderr.write(
            f"{message}\nampx run: the script was stopped there. --unchanged-if-refused runs it again without ampx.\n"
        )
        return REFUSED
    provided = [name for run in finished.runs for name in run.provided]
    but = f", but for {', '.join(provided)}, which is missing here" if provided else ""
    sys.stderr.write(f"{message}\nampx run: starting the script again, without ampx{but}\n")
    _flush(sys.stderr)
    command = request.program.command(("-m", "ampx", "run", "--stand-ins-only") if provided else ())
    if sys.platform != "win32":  # there exec would return to the shell at once
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode


def _end_interrupted() -> NoReturn:
    """End by the signal, as `python` does after it has printed the traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = lambda *error: None  # it is printed already
    raise KeyboardInterrupt


def report_of(target: Path, rank: int) -> Path:
    """Return where a process of a job writes its report: the first as asked, others beside it."""
    return target.with_name(f"{target.stem}.rank{rank}{target.suffix}") if rank else target


def with_origin(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with where and when it was made."""
    from .page import framework_versions, origin

    return {**report, "origin": origin(framework_versions(report["framework"]))}


def write_report(target: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON, and beside it as a page where that is asked for."""
    report = with_origin(report)
    if target.suffix == ".html":
        from .report import page

        target.write_text(page(report), encoding="utf-8")
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def to_json(request: RunRequest, finished: Finished) -> dict[str, Any]:
    """Return what `--report` writes."""
    rank, size = process_rank()
    seen = finished.to_json()
    if not request.settings.enabled:
        seen["notes"].append(
            f"The policy file {request.settings.policy!r} says enabled = false: the script ran as it does without ampx."
        )
    elif request.settings.stand_ins_only:
        seen["notes"].append(
            "Only stand-ins were asked for: the script ran as it does without ampx, but for modules that are missing."
        )
    return {
        **seen,
        "script": request.program.name,
        "arguments": list(request.program.arguments),
        "rank": rank,
        "world_size": size,
        "processes": finished.children,
    }


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return  # the script closed it, or whoever read it is gone
