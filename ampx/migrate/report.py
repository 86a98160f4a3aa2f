"""What a migration tells: findings by line, and what became of a file."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from ampx.syntax.source import located

# todo: a human must act. note: worth reading; nothing has to be done.
Kind: TypeAlias = Literal["todo", "note"]
# unchanged: nothing to rewrite. changed: rewritten. blocked: left as it is, see the findings. error: not readable.
Status: TypeAlias = Literal["unchanged", "changed", "blocked", "error"]


@dataclass(frozen=True)
class Finding:
    """One place in a file."""

    line: int  # line of the file as it was, from 1
    kind: Kind  # whether a human must act
    what: str
    advice: str


@dataclass
class FileReport:
    """What became of one file."""

    path: Path
    status: Status
    findings: list[Finding] = field(default_factory=list)
    before: bytes = b""
    after: bytes = b""  # what it would be, or is now; the same bytes where nothing changed
    encoding: str = "utf-8"  # how the bytes are read


class NeedsHumanError(Exception):
    """Raised by a dialect at what it does not fully understand; the program is then left alone."""

    def __init__(self, node: ast.AST, what: str, advice: str) -> None:
        line = located(node).lineno
        super().__init__(f"line {line}: {what}")
        self.node = node
        self.finding = Finding(line, "todo", what, advice)


def exit_code(reports: list[FileReport]) -> int:
    """Return 2 if a file could not be read or written, 1 if a human must act, else 0."""
    if any(report.status == "error" for report in reports):
        return 2
    return int(any(finding.kind == "todo" for report in reports for finding in report.findings))
