"""Find problems in files, on all processors where that pays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from ampx.errors import InvalidOptionError
from ampx.syntax.processes import on_all_processors
from ampx.syntax.program import Modules, import_graph
from ampx.syntax.source import Source, located

from .problem import Problem, Rule
from .rules import BY_CODE, RULES
from .script import Script, computes_float16

# What every file that a rule can find something in contains; others are parsed, and no rule looks at them.
_HINT: Final = re.compile(
    rb"\bamp\b|autocast|auto_cast|mixed_|float16|\bhalf\b|GradScaler|scaler\b|is_bf16_supported|scale_loss|\bfp16\b|gluon"
)
# What a file holds that may go wrong where another one computes in float16.
_CONSTANTS: Final = re.compile(rb"masked_fill|where\(|e-(0?[89]|[1-9]\d)|\de\+?\d|\d{6}")
_OPT_OUT: Final = re.compile(r"#\s*(?:ampx:\s*ignore(?:\[([\w, ]+)\])?|noqa(?::\s*([\w, ]+))?)", flags=re.I)
_Task: TypeAlias = tuple[Path, bytes, bool, frozenset[str]]


@dataclass
class Findings:
    """What a run found.

    Attributes:
        rules: What was looked for.
        files: How many files were looked at.
        problems: Sorted by file and line.
        unreadable: Files that could not be read, or not be written, with the reason.
        data: What was read of the files that can be fixed.
        fixed: How many problems were fixed, which are none any more.
    """

    rules: Sequence[Rule]
    files: int
    problems: list[Problem] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)
    data: dict[Path, bytes] = field(default_factory=dict)
    fixed: int = 0


def selected(select: Iterable[str] = (), ignore: Iterable[str] = (), fix: bool = False) -> tuple[Rule, ...]:
    """Return the rules that two lists of codes, or of beginnings of codes, leave.

    Those that are not looked for by default need a list that names them, or `fix`.

    Raises:
        InvalidOptionError: Something is no code of a rule.
    """
    chosen, left_out = ([code.strip().upper() for code in codes if code.strip()] for codes in (select, ignore))
    for code in (*chosen, *left_out):
        if not any(rule.code.startswith(code) for rule in RULES):
            raise InvalidOptionError(
                f"{code!r} is no rule; accepted: {', '.join(BY_CODE)}, and what they begin with. Pass one, or some "
                f"with commas between."
            )
    return tuple(rule for rule in RULES if _is_chosen(rule, chosen, fix) and not rule.code.startswith(tuple(left_out)))


def _is_chosen(rule: Rule, chosen: Sequence[str], fix: bool) -> bool:
    if rule.code in chosen:
        return True
    return (rule.default or fix) and (not chosen or rule.code.startswith(tuple(chosen)))


def lint(
    paths: Sequence[Path], rules: Sequence[Rule] | None = None, texts: Mapping[Path, bytes] | None = None
) -> Findings:
    """Return what rules, or those looked for by default, find in files. Never raises for what is in them.

    `texts` are further files that have been read, by the names under which they are told.
    """
    rules = selected() if rules is None else rules
    findings = Findings(rules, len(paths) + len(texts or {}))
    data = {**(texts or {}), **_read(paths, findings)}
    codes = frozenset(rule.code for rule in rules)
    float16 = _used_in_float16(data)

    def codes_for(path: Path, content: bytes) -> frozenset[str]:
        hinted = _HINT.search(content) or (path in float16 and _CONSTANTS.search(content))
        return codes if hinted else frozenset()

    tasks = [(path, content, path in float16, codes_for(path, content)) for path, content in data.items()]
    for _, (path, problems, reason) in on_all_processors(_check, tasks, [len(content) for _, content, *_ in tasks]):
        findings.problems += problems
        if reason:
            findings.unreadable[path] = reason
    findings.problems.sort()
    findings.data = {problem.path: data[problem.path] for problem in findings.problems if problem.fix}
    return findings


def _read(paths: Sequence[Path], findings: Findings) -> dict[Path, bytes]:
    """Return what is in files, and note those that cannot be read."""
    data = {}
    for path in paths:
        try:
            data[path] = path.read_bytes()
        except OSError as error:
            findings.unreadable[path] = f"cannot be read: {error.strerror or error}"
    return data


def _used_in_float16(data: Mapping[Path, bytes]) -> set[Path]:
    """Return the files that compute in float16, or that such files import, directly or through others."""
    waiting = [path for path, content in data.items() if computes_float16(content.decode(errors="replace"))]
    graph = import_graph(data, Modules(data)) if waiting else {}
    reached = set(waiting)
    while waiting:
        for path in graph[waiting.pop()]:
            if path not in reached:
                reached.add(path)
                waiting.append(path)
    return reached


def _check(task: _Task) -> tuple[Path, list[Problem], str]:
    path, data, float16, codes = task
    try:
        source = Source(path, data)
        if not codes:
            return path, [], ""
        script = Script(source, float16)
        problems = [problem for rule in RULES if rule.code in codes for problem in _problems(script, rule)]
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, SyntaxError):
            reason = error.msg if error.lineno is None else f"line {error.lineno}: {error.msg}"
        return path, [], f"cannot be parsed: {reason}"
    return path, problems, ""


def _problems(script: Script, rule: Rule) -> Iterable[Problem]:
    seen = set()
    lines = script.source.text.splitlines()
    for node, what, *fix in rule.check(script):
        place = located(node)
        line, column = place.lineno, place.col_offset + 1
        if (line, column) not in seen and not _is_opted_out(rule.code, lines[line - 1], lines[place.end_lineno - 1]):
            seen.add((line, column))
            yield Problem(script.source.path, line, column, rule.code, what, place.end_lineno, *fix)


def _is_opted_out(code: str, *lines: str) -> bool:
    """Return whether a comment at the end of a line says that a rule is not meant here."""
    for line in lines:
        match = _OPT_OUT.search(line)
        if match is not None:
            codes = (match[1] or match[2] or "").upper().replace(",", " ").split()
            if not codes or code in codes:
                return True
    return False
