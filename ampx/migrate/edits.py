"""What is to be changed in the text of one file, and the file with it changed. What is not named keeps every byte."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ampx.syntax.flow import Flow
from ampx.syntax.program import Program
from ampx.syntax.source import Source, comments, located

from .report import Finding, Kind, NeedsHumanError

WIDTH: Final = 100
LINE_END: Final = "\ufdd0"  # no character of any text


@dataclass(eq=False)
class Edit:
    """A piece of the text and what takes its place.

    Attributes:
        start, end: The piece.
        write: Gives the new text; called when all edits are known.
        statement: The statement whose comments must not be lost.
    """

    start: int
    end: int
    write: Callable[[], str]
    statement: ast.stmt


class Edits:
    """What a migration wants done to one file."""

    def __init__(self, program: Program, source: Source) -> None:
        self.program = program
        self.source = source
        self.findings: list[Finding] = []
        self.claimed: set[ast.AST] = set()  # references that an edit takes care of
        self.imports: dict[str, str] = {}  # modules that the new code needs beside ampx, with a comment for the line
        self._edits: dict[ast.AST, Edit] = {}
        self._before: dict[ast.stmt, list[str]] = {}
        self._after: dict[ast.stmt, list[str]] = {}
        self._removed: set[ast.stmt] = set()
        self._writing: set[Edit] = set()
        self._unit = source.indent_unit

    @property
    def nodes(self) -> set[ast.AST]:
        """What changes, or what something is put beside."""
        return {*self._edits, *self._before, *self._after, *self._removed}

    @property
    def first(self) -> ast.AST:
        """The first node that changes."""
        return min(self.nodes, key=self.program.order)

    # -- findings ----------------------------------------------------------------------------------------

    def tell(self, node: ast.AST, kind: Kind, what: str, advice: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(located(node).lineno, kind, what, advice))

    # -- what is done ------------------------------------------------------------------------------------

    def expression(self, node: ast.expr, text: str | Callable[[], str]) -> None:
        """Put an expression in the place of another; a function gives it with the edits inside made."""
        self._check_place(node)
        start, end = self.source.span(node)
        self._add(node, Edit(start, end, text if callable(text) else lambda: text, self.program.statement(node)))

    def statement(self, node: ast.AST, text: Callable[[], str]) -> None:
        """Put statements, written with four spaces and line feeds, in the place of the statement that holds a node."""
        statement = self.program.statement(node)
        self._check_alone(statement)
        start, end = self.source.span(statement)
        end = self.source.line_end(end)  # with the comment behind it
        self._add(statement, Edit(start, end, lambda: self._with_comment(statement, text()), statement))

    def remove(self, node: ast.AST) -> None:
        """Take a statement away; its comments stay."""
        statement = self.program.statement(node)
        if self._is_alone(statement):
            self._removed.add(statement)
        else:
            self.small_statement(statement, "pass")

    def small_statement(self, statement: ast.stmt, text: str) -> None:
        """Put a small statement in the place of one that shares its line."""
        start, end = self.source.span(statement)
        self._add(statement, Edit(start, end, lambda: text, statement))

    def insert_before(self, statement: ast.stmt, text: str) -> None:
        """Put statements before one; the comments above it stay above them."""
        self._check_alone(statement)
        self._before.setdefault(statement, []).append(text)

    def insert_after(self, statement: ast.stmt, text: str) -> None:
        """Put statements after one."""
        self._check_alone(statement)
        self._after.setdefault(statement, []).append(text)

    def _add(self, node: ast.AST, edit: Edit) -> None:
        if node in self._edits:
            raise NeedsHumanError(
                node, f"`{self.source.code(node).strip()}` would be rewritten twice", "Rewrite it by hand."
            )
        self._edits[node] = edit

    def _check_place(self, node: ast.expr) -> None:
        in_text = any(isinstance(outer, ast.JoinedStr) for outer in self.program.around(node))
        if in_text and not self.source.agrees(node):
            raise NeedsHumanError(node, "a call inside an f-string", "Take it out of the string, and migrate again.")

    def _check_alone(self, statement: ast.stmt) -> None:
        if not self._is_alone(statement):
            code = self.source.code(statement).strip()
            raise NeedsHumanError(statement, f"`{code}` shares its line", "Give it a line of its own.")

    def _is_alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement has its lines for itself."""
        start, end = self.source.span(statement)
        text = self.source.text
        before = text[self.source.line_start(start) : start]
        after = text[end : self.source.line_end(end)].strip(" \t\f")
        return not before.strip(" \t\f") and (not after or after.startswith("#"))

    # -- writing -----------------------------------------------------------------------------------------

    def written(self, node: ast.AST, name: str, options: Sequence[str]) -> str:
        """Write a call in the place of a node: on one line if that gets no longer than 100, else an argument a line."""
        start, end = self.source.span(node)
        last = min(self.source.span(self.program.statement(node))[1], self.source.line_end(end))
        call = f"{name}({', '.join(options)})"
        if start - self.source.line_start(start) + len(call) + last - end <= WIDTH:
            return call
        lines = "".join(f"    {option},\n" for option in options)
        return f"{name}(\n{lines})"

    def code(self, node: ast.AST) -> str:
        """Return the text of a node with the edits inside it made."""
        start, end = self.source.span(node)
        pieces, position = [], start
        inside = [edit for edit in self._edits.values() if start <= edit.start and edit.end <= end]
        for edit in sorted(inside, key=lambda edit: (edit.start, -edit.end)):
            if edit.start >= position and edit not in self._writing:
                pieces += [self.source.text[position : edit.start], self._write(edit)]
                position = edit.end
        # Line ends of the file are hidden from the code that lays out new lines.
        return "".join([*pieces, self.source.text[position:end]]).replace("\n", LINE_END)

    def _write(self, edit: Edit) -> str:
        self._writing.add(edit)
        try:
            return self._in_style(edit.write(), edit.start)
        finally:
            self._writing.remove(edit)

    def _in_style(self, text: str, start: int) -> str:
        """Return text with the indentation and line ends of the file, to be put at a position."""
        lines = text.split("\n")
        if len(lines) == 1:
            return text
        line = self.source.text[self.source.line_start(start) :]
        base = line[: len(line) - len(line.lstrip(" \t\f"))]
        indented = [lines[0]]
        for line in lines[1:]:
            body = line.lstrip(" ")
            indented.append(f"{base}{self._unit * ((len(line) - len(body)) // 4)}{body}" if body else "")
        return self.source.newline.join(indented)

    def _with_comment(self, statement: ast.stmt, text: str) -> str:
        """Put the comment behind a statement behind what takes its place: a block's behind the block's first line."""
        _, end = self.source.span(statement)
        comment = self.source.text[end : self.source.line_end(end)].rstrip()
        lines = text.split("\n")
        header = next((at for at in range(len(lines) - 1, -1, -1) if not lines[at].startswith((" ", ")"))), 0)
        at = header if lines[header].endswith(":") else len(lines) - 1
        lines[at] += comment
        return "\n".join(lines)

    def apply(self) -> str:
        """Return the text of the file with every edit made."""
        source = self.source
        pieces: list[tuple[int, int, str]] = []
        by_statement: dict[ast.stmt, list[Edit]] = {}
        for edit in self._edits.values():
            by_statement.setdefault(edit.statement, []).append(edit)
        for statement, edits in by_statement.items():
            pieces += self._changed(statement, edits)
        pieces += self._lines_away()
        for statement, texts in self._before.items():
            at, _ = source.span(statement)
            pieces.append((at, at, self._in_style("\n".join([*texts, ""]), at) + self._base(at)))
        for statement, texts in self._after.items():
            at = source.line_end(source.span(statement)[1])
            start, _ = source.span(statement)
            pieces.append((at, at, source.newline + self._base(start) + self._in_style("\n".join(texts), start)))
        result, position = [], 0
        for start, end, text in sorted(pieces, key=lambda piece: piece[:2]):
            result += [source.text[position:start], text]
            position = max(position, end)
        return "".join([*result, source.text[position:]]).replace(LINE_END, "\n")

    def _base(self, at: int) -> str:
        return self.source.text[self.source.line_start(at) : at]

    def _changed(self, statement: ast.stmt, edits: list[Edit]) -> list[tuple[int, int, str]]:
        """Return the pieces that change in a statement; comments that would be lost go above it."""
        outermost = [
            edit
            for edit in edits
            if not any(other is not edit and other.start <= edit.start and edit.end <= other.end for other in edits)
        ]
        pieces = []
        for edit in outermost:
            pieces.append((edit.start, edit.end, self._write(edit)))
        lost: list[str] = []
        for start, end, text in pieces:
            kept = comments(text.replace(LINE_END, "\n"))
            lost += [comment for comment in self._comments_in(statement, start, end) if comment not in kept]
        if lost:
            start, _ = self.source.span(statement)
            base = self._base(start)
            text = "".join(f"{comment}{self.source.newline}{base}" for comment in lost)
            pieces.append((start, start, text))
        return pieces

    def _comments_in(self, statement: ast.stmt, start: int, end: int) -> list[str]:
        """Return the comments of a statement that begin in a piece of it."""
        first, _ = self.source.span(statement)
        before = len(self.source.comments(first, start))
        return self.source.comments(first, end)[before:]

    def _lines_away(self) -> list[tuple[int, int, str]]:
        """Return the pieces by which statements go, with blank lines above them; an emptied block gets a `pass`."""
        source, pieces = self.source, []
        for statement in self._removed:
            start, end = source.span(statement)
            first, last = source.line_start(start), source.next_line(end)
            while first > 0 and not source.text[source.line_start(first - 1) : first].strip():
                first = source.line_start(first - 1)
            text = ""
            comment = source.text[end : source.line_end(end)].strip()
            if comment:
                text = f"{self._base(start)}{comment}{source.text[source.line_end(end) : last]}"
            block = self.program.block(statement)
            emptied = all(other in self._removed for other in block)
            if emptied and statement is block[-1] and not isinstance(self.program.parent(statement), ast.Module):
                text += f"{self._base(start)}pass{source.text[source.line_end(end) : last]}"
            pieces.append((first, last, text))
        return pieces


class Plan:
    """The edits of every file of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._edits: dict[Source, Edits] = {}
        self._flow: Flow | None = None
        self._files = 0

    @property
    def flow(self) -> Flow:
        """The bindings and uses of all files that the program has now."""
        if self._flow is None or self._files < len(self.program.sources):
            self._flow, self._files = Flow(self.program), len(self.program.sources)
        return self._flow

    def of(self, node: ast.AST) -> Edits:
        """Return the edits of a node's file."""
        source = self.program.source(node)
        if source not in self._edits:
            self._edits[source] = Edits(self.program, source)
        return self._edits[source]

    def all(self) -> list[Edits]:
        """Return the edits of all files that something was planned or told for."""
        return list(self._edits.values())

    @property
    def nodes(self) -> set[ast.AST]:
        """What changes in any file."""
        return {node for edits in self._edits.values() for node in edits.nodes}
