"""Find, read and write the files of a migration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from ampx.syntax.files import replace
from ampx.syntax.processes import on_all_processors
from ampx.syntax.program import Modules, beside, import_graph

from .engine import Outline, Surroundings, is_hinted, outline, programs, rewrite
from .report import FileReport, Finding

File: TypeAlias = tuple[Path, bytes]
Result = TypeVar("Result")


class Progress(Protocol):
    """Is told how far a migration is."""

    def __call__(self, task: str, done: int, total: int, /) -> object:
        """Take what is being done, how many bytes of it are done, and how many there are."""


def examine(paths: Iterable[Path], progress: Progress | None = None) -> list[FileReport]:
    """Return what files would become. Never raises for what is in them."""
    reports, data = _read(paths)
    foreign = _imported_beside(data)
    data |= foreign
    work = _Work(progress)
    outlines = work.do("Reading", _outline, [[file] for file in data.items() if is_hinted(file[1])])
    for read in outlines:
        if read.error is not None and read.path in reports:
            before = data[read.path]
            reports[read.path] = FileReport(read.path, "error", [read.error], before, before)
    modules = Modules(data)
    imports = import_graph(data, modules)
    groups = [[(path, data[path]) for path in group] for group in programs(outlines, data, imports)]
    work.around = Surroundings(modules, _inverted(imports), frozenset(foreign))
    for rewritten in work.do("Rewriting", _rewrite, groups):
        reports.update({report.path: report for report in rewritten if report.path in reports})
    return list(reports.values())


def _read(paths: Iterable[Path]) -> tuple[dict[Path, FileReport], dict[Path, bytes]]:
    """Return a report for each file, and what is in those that can be read."""
    reports: dict[Path, FileReport] = {}
    data: dict[Path, bytes] = {}
    for path in paths:
        try:
            data[path] = path.read_bytes()
            reports[path] = FileReport(path, "unchanged", before=data[path], after=data[path])
        except OSError as error:
            reports[path] = _failed(FileReport(path, "error"), "cannot be read", error)
    return reports, data


def _inverted(imports: Mapping[Path, Sequence[Path]]) -> dict[Path, list[Path]]:
    """Return the files that import each file."""
    importers: dict[Path, list[Path]] = {}
    for path, imported in imports.items():
        for other in imported:
            importers.setdefault(other, []).append(path)
    return importers


def _imported_beside(data: Mapping[Path, bytes]) -> dict[Path, bytes]:
    """Return the files that those with old names import, directly or through others, and that were not named."""
    named = {os.path.abspath(path) for path in data}
    foreign: dict[Path, bytes] = {}
    waiting = [(path, content) for path, content in data.items() if is_hinted(content)]
    while waiting:
        importer, content = waiting.pop()
        for path in beside(importer, content):
            if os.path.abspath(path) not in named:
                named.add(os.path.abspath(path))
                try:
                    foreign[path] = path.read_bytes()
                except OSError:
                    continue
                waiting.append((path, foreign[path]))
    return foreign


class _Work:
    """Does many things, on all processors where that pays."""

    def __init__(self, progress: Progress | None) -> None:
        self._tell = progress or (lambda task, done, total: None)
        self.around = Surroundings()

    def do(
        self, name: str, function: Callable[[Sequence[File]], Result], tasks: Sequence[Sequence[File]]
    ) -> list[Result]:
        """Return what a function gives for each task."""
        sizes = [sum(len(content) for _, content in task) for task in tasks]
        total, done = sum(sizes), 0
        results: dict[int, Result] = {}
        self._tell(name, 0, total)
        for position, result in on_all_processors(function, tasks, sizes, _set, self.around):
            results[position] = result
            done += sizes[position]
            self._tell(name, done, total)
        return [results[position] for position in range(len(tasks))]


_around: list[Surroundings] = []


def _set(around: Surroundings) -> None:
    """Take what every task of a process needs to know."""
    _around[:] = [around]


def _outline(files: Sequence[File]) -> Outline:
    return outline(*files[0])


def _rewrite(files: Sequence[File]) -> list[FileReport]:
    return rewrite(files, _around[0])


def write(report: FileReport) -> None:
    """Put a rewritten file in place of the old one in one step, with its mode; a failure is noted in the report."""
    try:
        replace(report.path, report.before, report.after)
    except OSError as error:
        _failed(report, "cannot be written", error)


def _failed(report: FileReport, what: str, error: OSError) -> FileReport:
    report.status = "error"
    reason = error.strerror or str(error)
    report.findings.append(Finding(1, "todo", f"the file {what}: {reason}", "See to it, and run this again."))
    return report
