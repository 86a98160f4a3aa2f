"""What `ampx migrate` does and prints."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampx.errors import InvalidOptionError
from ampx.migrate import files
from ampx.migrate.report import FileReport, exit_code
from ampx.syntax.files import find

from .terminal import terminal

SCHEMA = "ampx.migrate/1"


def migrate(
    paths: Sequence[Path], *, diff: bool, write: bool, check: bool, as_json: bool, echo: Callable[[str], None]
) -> int:
    """Look at the files, write or show what is asked for, print the rest; return the exit code."""
    if check and write:
        raise InvalidOptionError("--check and --write exclude each other: the first one writes nothing. Pass one.")
    if diff and as_json:
        raise InvalidOptionError("--diff and --json exclude each other: the JSON holds the differences. Pass one.")
    reports = _examine(paths)
    if write:
        for report in _changed(reports):
            files.write(report)
    if as_json:
        echo(json.dumps(_to_json(reports, write), indent=2))
    else:
        for report in _changed(reports) if diff else ():
            echo(_diff(report))
        for line in _lines(reports, write):
            echo(line)
    code = exit_code(reports)
    return max(code, int(bool(_changed(reports)))) if check else code


def _changed(reports: Sequence[FileReport]) -> list[FileReport]:
    return [report for report in reports if report.status == "changed"]


def _examine(paths: Sequence[Path]) -> list[FileReport]:
    """Look at the files; on a terminal a bar shows how far it is."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = terminal.console(stderr=True)
    shown = console.is_terminal and not terminal.quiet
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # No thread draws it: processes are started meanwhile.
    with Progress(*columns, console=console, transient=True, disable=not shown, auto_refresh=False) as bar:
        task = bar.add_task("Looking for files", total=None)

        def tell(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total, refresh=True)

        return files.examine(find(paths), tell)


def _diff(report: FileReport) -> str:
    before, after = (
        data.decode(report.encoding, errors="replace").splitlines(keepends=True)
        for data in (report.before, report.after)
    )
    name = report.path.as_posix()
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    # A last line without its end would run into the next one.
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return text.rstrip("\n")


def _lines(reports: Sequence[FileReport], wrote: bool) -> list[str]:
    findings = [(report, finding) for report in reports for finding in report.findings]
    lines = [
        f"{report.path}:{finding.line}: {finding.kind}: {finding.what}. {finding.advice}"
        for report, finding in findings
    ]
    changed = _changed(reports)
    lines += [f"{report.path}: {'migrated' if wrote else 'can be migrated'}" for report in changed]
    if terminal.quiet:
        return lines
    todos = sum(finding.kind == "todo" for _, finding in findings)
    statuses = Counter(report.status for report in reports)
    parts = [
        f"{len(reports)} {_plural(len(reports), 'file')} read",
        f"{len(changed)} {'migrated' if wrote else 'to migrate'}",
        f"{statuses['blocked']} left as they are",
        f"{statuses['error']} that cannot be read or written",
        f"{todos} {_plural(todos, 'place')} for a human",
    ]
    lines.append(f"{', '.join(parts)}.")
    if changed and not wrote:
        lines.append("Nothing was written; --diff shows the changes, --write makes them.")
    return lines


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _to_json(reports: Sequence[FileReport], wrote: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "written": wrote,
        "files": [
            {
                "path": str(report.path),
                "status": report.status,
                "findings": [vars(finding) for finding in report.findings],
                "diff": _diff(report) if report.status == "changed" else "",
            }
            for report in reports
            if report.status != "unchanged" or report.findings
        ],
        "read": len(reports),
    }
