"""Rewrite the files of a tree, program by program.

Files that belong to one program, by their imports, and that use the old API of one framework are rewritten together or
not at all: a session, a scaler or an optimizer that goes from one to the other would be of two kinds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ampx.syntax.program import Modules, Program, import_graph
from ampx.syntax.source import Source

from . import apex_amp, fluid_amp, imports, mxnet_amp, paddle_amp, tensorflow_amp, torch_amp
from .edits import Edits, Plan
from .report import FileReport, Finding, NeedsHumanError

# What every file that uses one of the old names contains; others are not even parsed.
_HINT: Final = re.compile(
    rb"\bamp\b|autocast|auto_cast|mixed_precision|LossScaleOptimizer|\bapex\b|GradScaler|AmpScaler|amp_guard"
)
# What a file contains that works with a scaler made elsewhere.
_RECEIVER: Final = re.compile(
    rb"\.unscale_\(|scaler\.(scale|step|update|minimize|get_scale|state_dict|load_state_dict)\b|\.scale\([^\n]*\)\.backward"
)
_SCALED: Final = ("torch", "paddle")


@dataclass(frozen=True)
class Dialect:
    """One old API."""

    name: str  # what users call it
    framework: str  # the framework of its session
    starts: tuple[str, ...]  # full names, or the modules they are in, whose use is a reason to change a file
    # Full names that its imports start with, and whether `import ampx` takes the place of such an import.
    roots: Mapping[str, bool]
    rewrite: Callable[[Plan], None]  # plans the edits


DIALECTS: Final = (
    Dialect("apex.amp", "torch", ("apex.amp",), {"apex": True}, lambda plan: apex_amp.ApexAmp(plan).rewrite()),
    Dialect(
        "mxnet.amp",
        "mxnet",
        mxnet_amp.ROOTS,
        dict.fromkeys(mxnet_amp.ROOTS, True),
        lambda plan: mxnet_amp.MXNetAmp(plan).rewrite(),
    ),
    Dialect(
        "paddle.amp", "paddle", tuple(paddle_amp.SCALERS), dict.fromkeys(paddle_amp.ROOTS, False), paddle_amp.rewrite
    ),
    Dialect("paddle.fluid", "paddle", (*fluid_amp.ROOTS, *fluid_amp.EAGER), {}, fluid_amp.rewrite),
    Dialect(
        "TensorFlow",
        "tensorflow",
        tensorflow_amp.ROOTS,
        {},
        lambda plan: tensorflow_amp.TensorFlowAmp(plan).rewrite(),
    ),
    Dialect(
        "torch.amp",
        "torch",
        tuple(torch_amp.SCALERS),
        dict.fromkeys(torch_amp.ROOTS, False),
        lambda plan: torch_amp.TorchAmp(plan).rewrite(),
    ),
)


def is_hinted(data: bytes) -> bool:
    """Return whether a file may use one of the old names."""
    return _HINT.search(data) is not None


@dataclass
class Outline:
    """What a file is, as far as it can be told by itself."""

    path: Path
    frameworks: frozenset[str] = frozenset()  # those whose old API it uses in a way that would change it
    error: Finding | None = None  # why it cannot be read; None where it can


def outline(path: Path, data: bytes) -> Outline:
    """Parse a file and return what it uses. Never raises for what is in it."""
    try:
        program = Program()
        program.add(Source(path, data))
        references = program.references()
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        return Outline(path, error=_unreadable(data, error))
    frameworks = {
        dialect.framework
        for dialect in DIALECTS
        for node, name in references
        if _is_reason(name, dialect) and not program.in_annotation(node)
    }
    return Outline(path, frozenset(frameworks))


def _is_reason(name: str, dialect: Dialect) -> bool:
    """Return whether the use of a name is a reason to change a file."""
    if not f"{name}.".startswith(tuple(f"{start}." for start in dialect.starts)):
        return False
    words = name.split(".")
    return dialect.name != "TensorFlow" or "LossScaleOptimizer" in words or "experimental" in words


# -- programs --------------------------------------------------------------------------------------------------


def programs(
    outlines: Iterable[Outline], data: Mapping[Path, bytes], imports: Mapping[Path, Sequence[Path]]
) -> list[list[Path]]:
    """Return the files that have to be looked at, those of one program together.

    Two files are of one program where one imports the other, or a third imports both, directly or through others.
    """
    by_path = {outline.path: outline for outline in outlines}
    receivers = {path for path, content in data.items() if _RECEIVER.search(content)}
    unreadable = {path for path, outline in by_path.items() if outline.error is not None}
    groups = _Groups()
    for framework in sorted(frozenset().union(*(outline.frameworks for outline in by_path.values()))):
        users = {path for path, outline in by_path.items() if framework in outline.frameworks}
        members = users | unreadable | (receivers if framework in _SCALED else set())
        for connected in _connected(imports, members):
            if not users.isdisjoint(connected):
                groups.join(connected)
    for path in by_path:
        if path not in unreadable:
            groups.join([path])
    return groups.all()


def _connected(imported: Mapping[Path, Sequence[Path]], members: set[Path]) -> list[list[Path]]:
    """Return the members by program. Each file knows one group: that of all members among what it leads to."""
    groups = _Groups()
    for path in members:
        groups.join([path])
    for cycle in _in_order(imported):
        below = [groups.mark(path) for inner in cycle for path in (inner, *imported[inner])]
        group = groups.join([path for path in below if path is not None])
        for path in cycle:
            groups.marks[path] = group
    return groups.all()


def _in_order(imported: Mapping[Path, Sequence[Path]]) -> list[list[Path]]:
    """Return the files, what is imported before what imports it, and circles of imports together (Tarjan)."""
    order: list[list[Path]] = []
    number: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    on_stack: set[Path] = set()
    for start in imported:
        waiting = [(start, iter(imported[start]))] if start not in number else []
        while waiting:
            path, rest = waiting[-1]
            if path not in number:
                number[path] = low[path] = len(number)
                stack.append(path)
                on_stack.add(path)
            after = next((file for file in rest if file not in number or file in on_stack), None)
            if after is not None and after not in number:
                waiting.append((after, iter(imported.get(after, ()))))
                continue
            if after is not None:
                low[path] = min(low[path], number[after])
                continue
            waiting.pop()
            if waiting:
                low[waiting[-1][0]] = min(low[waiting[-1][0]], low[path])
            if low[path] == number[path]:
                cycle = stack[stack.index(path) :]
                del stack[-len(cycle) :]
                on_stack.difference_update(cycle)
                order.append(cycle)
    return order


class _Groups:
    """Sets of files that grow together."""

    def __init__(self) -> None:
        self._group: dict[Path, list[Path]] = {}
        self.marks: dict[Path, Path | None] = {}

    def mark(self, path: Path) -> Path | None:
        """Return a file of the group that a file leads to."""
        return path if path in self._group else self.marks.get(path)

    def join(self, paths: Iterable[Path]) -> Path | None:
        """Put files into one group, with those that are in their groups already; return one of them."""
        joined: list[Path] = []
        for path in paths:
            group = self._group.setdefault(path, [path])
            if group is joined:
                continue
            if not joined:
                joined = group
                continue
            smaller, joined = sorted((group, joined), key=len)
            joined.extend(smaller)
            self._group.update(dict.fromkeys(smaller, joined))
        return joined[0] if joined else None

    def all(self) -> list[list[Path]]:
        """Return the groups."""
        return list({id(group): group for group in self._group.values()}.values())


# -- rewriting -------------------------------------------------------------------------------------------------


@dataclass
class Surroundings:
    """What else is in the tree that a program is of."""

    modules: Modules = field(default_factory=Modules)  # knows which file an import means
    importers: Mapping[Path, Sequence[Path]] = field(default_factory=dict)  # the files that import a file
    foreign: frozenset[Path] = frozenset()  # files that were not named, and may not be changed


def migrate(path: Path, data: bytes) -> FileReport:
    """Return what a file would become that is a program by itself. Never raises for what is in it."""
    if not is_hinted(data):
        return FileReport(path, "unchanged", before=data, after=data)
    error = outline(path, data).error
    if error is not None:
        return FileReport(path, "error", [error], data, data)
    return rewrite([(path, data)])[0]


def rewrite(files: Sequence[tuple[Path, bytes]], around: Surroundings | None = None) -> list[FileReport]:
    """Return what the files of one program would become. Never raises for what is in them."""
    around = around or Surroundings()
    reports = {path: FileReport(path, "unchanged", before=data, after=data) for path, data in files}
    named = dict(files)
    program = _program(named, around)
    unreadable = [path for path, data in files if not _add(program, data, reports[path])]
    try:
        texts = _rewrite(program, reports)
    except NeedsHumanError as error:
        culprit = program.source(error.node).path
        graph = import_graph(named, around.modules)
        leaf = not any(culprit in imported for path, imported in graph.items() if path != culprit)
        _block(reports, culprit, error.finding, around.foreign, leaf)
        return list(reports.values())
    except Exception as error:  # a program that the analysis cannot cope with must not keep the others from theirs
        what = f"it cannot be analysed: {type(error).__name__}: {error}"
        finding = Finding(1, "todo", what, "It was left as it is; report this.")
        return [replace(report, status="error", findings=[finding]) for report in reports.values()]
    if unreadable and texts:
        _block(reports, unreadable[0], reports[unreadable[0]].findings[0], around.foreign)
    else:
        _put(texts, reports, around)
    return list(reports.values())


def _put(texts: Mapping[Path, bytes], reports: Mapping[Path, FileReport], around: Surroundings) -> None:
    """Put the new texts into the reports, if all are of files that were named."""
    outside = [path for path in texts if path in around.foreign or path not in reports]
    if outside:
        finding = Finding(1, "todo", "the same mixed precision is used", "Pass that file, too.")
        _block(reports, outside[0], finding, {*around.foreign, outside[0]})
        return
    for path, data in texts.items():
        reports[path].status, reports[path].after = "changed", data


def _program(named: Mapping[Path, bytes], around: Surroundings) -> Program:
    """Return a program without files, which finds those of its tree on disk."""

    def load(path: Path) -> Source | None:
        try:
            return Source(path, named[path] if path in named else path.read_bytes())
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
            return None

    def importers(path: Path) -> Iterable[bytes]:
        for importer in around.importers.get(path, ()):
            if importer not in named:
                try:
                    yield importer.read_bytes()
                except OSError:
                    continue

    return Program(around.modules, load, importers)


def _add(program: Program, data: bytes, report: FileReport) -> bool:
    """Add a file to a program; return whether it could be read."""
    try:
        source = Source(report.path, data)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        report.status, report.findings = "error", [_unreadable(data, error)]
        return False
    program.add(source)
    report.encoding = source.encoding
    return True


def _rewrite(program: Program, reports: Mapping[Path, FileReport]) -> dict[Path, bytes]:
    """Return what every file that changes becomes, and put what is to be told into the reports."""
    plan = Plan(program)
    active: list[Dialect] = []
    for dialect in DIALECTS:
        before = plan.nodes
        dialect.rewrite(plan)
        fresh = plan.nodes - before
        if not fresh:
            continue
        for other in active:
            if other.framework == dialect.framework:
                where = "file uses" if len(program.sources) == 1 else "program uses"
                raise NeedsHumanError(
                    min(fresh, key=program.order),
                    f"the {where} both {other.name} and {dialect.name}",
                    "Remove one of the two, and migrate again.",
                )
        active.append(dialect)
    roots = {root: place for dialect in active for root, place in dialect.roots.items()}
    for edits in plan.all():
        if edits.source.path in reports:
            findings = sorted(set(edits.findings), key=lambda finding: (finding.line, finding.what))
            reports[edits.source.path].findings = findings
    texts = {}
    for edits in plan.all():
        if edits.nodes:
            texts[edits.source.path] = _changed(program, edits, roots)
    return texts


def _changed(program: Program, edits: Edits, roots: Mapping[str, bool]) -> bytes:
    if any(name.id == "ampx" for name in program.every(ast.Name, edits.source.tree)):
        raise NeedsHumanError(edits.first, "the file uses the name `ampx` already", "Rename it, or finish by hand.")
    try:
        return imports.fix(edits, roots, edits.imports).data
    except (SyntaxError, ValueError) as error:
        what = f"the rewritten file would not be valid: {str(error).splitlines()[0]}"
        raise NeedsHumanError(edits.first, what, "Rewrite it by hand.") from error


def _block(
    reports: Mapping[Path, FileReport],
    culprit: Path,
    finding: Finding,
    foreign: Iterable[Path] = (),
    leaf: bool = False,
) -> None:
    """Leave all files of a program as they are, because of one place in one of them; no other imports a leaf."""
    advice = "See to that first; then both can be migrated."
    if leaf:  # a test, say
        advice = f"See to that first; or migrate the others without {culprit.name}, which none of them imports."
    what = f"it is left as it is, with the program of {culprit}: line {finding.line} there is for a human"
    others = []
    for path, report in reports.items():
        report.after = report.before
        if path == culprit:
            report.status = "error" if report.status == "error" else "blocked"
            report.findings = [finding]
        elif report.status != "error" and _is_part(report):
            report.status = "blocked"
            report.findings = [Finding(1, "note", what, advice)]
            others.append(report)
    if culprit in foreign or culprit not in reports:  # nobody would see its report
        what = f"it belongs to a program with {culprit}, where in line {finding.line} {finding.what}"
        for report in [report for report in others if report.path not in foreign][:1]:
            report.findings = [Finding(1, "todo", what, finding.advice)]


def _is_part(report: FileReport) -> bool:
    """Return whether a file would change with its program."""
    return bool(outline(report.path, report.before).frameworks) or _RECEIVER.search(report.before) is not None


def _unreadable(data: bytes, error: Exception) -> Finding:
    line = int(getattr(error, "lineno", None) or 1)
    old = re.search(rb"^\s*(print\s+[^(\s=]|exec\s+['\"]|except\s+\w+\s*,\s*\w+\s*:)", data, flags=re.M)
    if old is not None:
        line = data.count(b"\n", 0, old.start(1)) + 1
        return Finding(line, "todo", "this is Python 2", "Convert it to Python 3 first, for instance with 2to3.")
    reason = getattr(error, "msg", None) or str(error).split("\n")[0]
    return Finding(line, "todo", f"it cannot be parsed: {reason}", "Mend it first; it was left as it is.")
