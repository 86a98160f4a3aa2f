"""Find, read and write the files of a migration."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ampx.errors import InvalidOptionError

from .engine import migrate
from .report import FileReport, Finding

# Folders whose files are somebody else's, or generated.
_SKIPPED: Final = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}


def find(paths: Iterable[Path]) -> Iterator[Path]:
    """Give the Python files below some paths, each once and sorted.

    Symbolic links are not followed, neither files nor folders; hidden folders and those of environments and builds
    are passed over. A file that is named is taken whatever its ending.

    Raises:
        InvalidOptionError: A path is not there, or is a symbolic link.
    """
    seen: set[Path] = set()
    for path in paths:
        if path.is_symlink():
            raise InvalidOptionError(f"{path} is a symbolic link; accepted: files and folders. Pass what it points to.")
        if not path.exists():
            raise InvalidOptionError(f"{path} is not there; accepted: files and folders. Check the spelling.")
        for one in [path] if path.is_file() else _below(path):
            if one not in seen:
                seen.add(one)
                yield one


def _below(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder, followlinks=False):
        here = Path(where)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and not name.startswith(".") and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            path = here / name
            if name.endswith((".py", ".pyw")) and path.is_file() and not path.is_symlink():
                yield path


def examine(path: Path) -> FileReport:
    """Give what a file would become. Never raises for the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return _failed(FileReport(path, "error"), "cannot be read", error)
    return migrate(path, data)


def write(report: FileReport) -> None:
    """Put a rewritten file in place of the old one in one step, with its mode; a failure is noted in the report."""
    try:
        mode = stat.S_IMODE(report.path.stat().st_mode)
        if report.path.is_symlink() or report.path.read_bytes() != report.before:
            raise OSError("it has changed since it was read")
        handle, name = tempfile.mkstemp(prefix=f".{report.path.name}.", dir=report.path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(report.after)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, mode)
            os.replace(name, report.path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _failed(report, "cannot be written", error)


def _failed(report: FileReport, what: str, error: OSError) -> FileReport:
    report.status = "error"
    reason = error.strerror or str(error)
    report.findings.append(Finding(1, "todo", f"the file {what}: {reason}", "See to it, and run this again."))
    return report
