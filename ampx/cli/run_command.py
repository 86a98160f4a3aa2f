"""What `ampx run` does between reading its options and ending as the script ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from ampx.errors import InvalidOptionError
from ampx.running.supervising import Finished, supervise

from .run_request import RunRequest
from .run_summary import summary_lines

REFUSED = 3


def check_report(report: Path | None) -> None:
    """Check the target of `--report`, before the script has trained for hours.

    Raises:
        InvalidOptionError: It is of no kind that can be written, or cannot be written.

    Sync: none.
    """
    if report is None:
        return
    if report.suffix not in (".json", ".html"):
        raise InvalidOptionError(
            f"--report {str(report)!r} is of no known kind; accepted: a name that ends in .json or .html. Change it."
        )
    if report.suffix == ".html":
        import matplotlib.figure  # noqa: F401 -- a missing extra is told before the script runs
    if not report.parent.is_dir():
        raise InvalidOptionError(
            f"--report {str(report)!r} cannot be written: there is no folder {str(report.parent)!r}; accepted: a "
            f"file in a folder that exists. Make the folder."
        )


def run_to_the_end(request: RunRequest) -> int:
    """Run a script, print the summary, and end as the script ended.

    Returns:
        The exit code, where the script did not end by an exception of its own.

    Raises:
        SystemExit, KeyboardInterrupt: As the script.
        AmpxError: There is no such script, or the framework that was named cannot be automated.

    Sync: none of its own.
    """
    stderr = sys.stderr  # the script may replace it
    finished = supervise(request.program, request.settings, request.framework)
    if finished.refusal is not None:
        return _end_refused(request, finished)
    error = finished.error
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):  # a message, which Python would print last
            stderr.write(f"{error.code}\n")
            error = SystemExit(1)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    _flush(sys.stdout)
    code = 1 if error is not None else 0
    if not request.settings.stand_ins_only:
        for line in summary_lines(finished):
            stderr.write(f"{line}\n")
    _flush(stderr)
    if request.report is not None:
        write_report(request.report, request, finished)
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt):
        _end_interrupted()
    return code


def _end_refused(request: RunRequest, finished: Finished) -> int:
    _flush(sys.stdout)
    message = f"ampx run: refused: {finished.refusal}"
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


def write_report(target: Path, request: RunRequest, finished: Finished) -> None:
    """Write the report as JSON or as a page. Sync: none."""
    found = to_json(request, finished)
    if target.suffix == ".json":
        target.write_text(json.dumps(found, indent=1) + "\n")
        return
    from .run_page import page

    target.write_text(page(found))


def to_json(request: RunRequest, finished: Finished) -> dict[str, Any]:
    """Give what `--report` writes. Sync: none."""
    effective = finished.effective
    return {
        **finished.recorder.to_json(),
        "script": request.program.name,
        "arguments": list(request.program.arguments),
        "framework": None if finished.run is None else finished.run.framework,
        "device": None if effective is None else effective.device,
        "dtype": None if effective is None else effective.dtype or "float32",
        "level": None if effective is None else effective.level,
        "reason": None if effective is None else effective.reason,
        "lines": list(finished.explain()),
    }


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return  # the script closed it, or whoever read it is gone
