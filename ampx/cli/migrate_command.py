"""What `ampx migrate` does and prints."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampx.errors import InvalidOptionError
from ampx.migrate import files
from ampx.migrate.report import FileReport, exit_code

SCHEMA = "ampx.migrate/1"


def migrate(
    paths: Sequence[Path], *, diff: bool, write: bool, check: bool, as_json: bool, echo: Callable[[str], None]
) -> int:
    """Look at the files, write or show what is asked for, tell the rest; give the exit code."""
    if check and write:
        raise InvalidOptionError("--check and --write exclude each other: the first one writes nothing. Pass one.")
    if diff and as_json:
        raise InvalidOptionError("--diff and --json exclude each other: the JSON holds the differences. Pass one.")
    reports = _examine(paths)
    if write:
        for one in reports:
            if one.status == "changed":
                files.write(one)
    if as_json:
        import json

        echo(json.dumps(_to_json(reports, write), indent=2))
    else:
        for one in reports:
            if diff and one.status == "changed":
                echo(_diff(one))
        for line in _lines(reports, write):
            echo(line)
    code = exit_code(reports)
    return max(code, int(any(one.status == "changed" for one in reports))) if check else code


def _examine(paths: Sequence[Path]) -> list[FileReport]:
    """Look at the files; on a terminal a bar shows how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # No thread draws it: processes are started meanwhile.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=False
    ) as bar:
        task = bar.add_task("Looking for files", total=None)

        def tell(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total, refresh=True)

        return files.examine(files.find(paths), tell)


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
    lines = []
    for one in reports:
        lines += [f"{one.path}:{found.line}: {found.kind}: {found.what}. {found.advice}" for found in one.findings]
    changed = [one for one in reports if one.status == "changed"]
    for one in changed:
        lines.append(f"{one.path}: {'migrated' if wrote else 'can be migrated'}")
    todos = sum(found.kind == "todo" for one in reports for found in one.findings)
    parts = [
        f"{len(reports)} {_plural(len(reports), 'file')} read",
        f"{len(changed)} {'migrated' if wrote else 'to migrate'}",
        f"{sum(one.status == 'blocked' for one in reports)} left as they are",
        f"{sum(one.status == 'error' for one in reports)} that cannot be read or written",
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
                "path": str(one.path),
                "status": one.status,
                "findings": [vars(found) for found in one.findings],
                "diff": _diff(one) if one.status == "changed" else "",
            }
            for one in reports
            if one.status != "unchanged" or one.findings
        ],
        "read": len(reports),
    }
