"""One file: its text, its syntax tree, and where each node of the tree stands in the text."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from bisect import bisect_right
from pathlib import Path
from typing import Final, Protocol, cast

_NEWLINE: Final = re.compile(r"\r\n|\r|\n")
_MARK: Final = b"\xef\xbb\xbf"


class Source:
    """A parsed file. Positions are indices into its text."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self.data = data
        self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]  # how the bytes are read
        self._mark = _MARK if data.startswith(_MARK) else b""
        # The same as text, line ends as they are.
        self.text = data.removeprefix(_MARK).decode(self.encoding.removesuffix("-sig"))
        self.tree = parse(self.text)  # the syntax tree
        first = _NEWLINE.search(self.text)
        self.newline = first[0] if first else "\n"  # the line end that comes first in it
        self._starts = [0, *(match.end() for match in _NEWLINE.finditer(self.text))]

    def with_text(self, text: str) -> Source:
        """Return another file of this name, encoding and byte order mark."""
        return Source(self.path, self._mark + text.encode(self.encoding.removesuffix("-sig")))

    # -- positions ---------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends; parentheses around it are outside."""
        place = located(node)
        return self._index(place.lineno, place.col_offset), self._index(place.end_lineno, place.end_col_offset)

    def _index(self, line: int, column: int) -> int:
        """Return the index of a column, which Python counts in bytes of UTF-8."""
        start = self._starts[line - 1]
        text = self.text[start : start + column]
        return start + (column if text.isascii() else len(text.encode()[:column].decode()))

    def line_start(self, index: int) -> int:
        """Return where the line of an index begins."""
        return self._starts[bisect_right(self._starts, index) - 1]

    def line_end(self, index: int) -> int:
        """Return where the line of an index ends, before its line end."""
        match = _NEWLINE.search(self.text, index)
        return match.start() if match else len(self.text)

    def next_line(self, index: int) -> int:
        """Return where the line after that of an index begins."""
        match = _NEWLINE.search(self.text, index)
        return match.end() if match else len(self.text)

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def agrees(self, node: ast.expr) -> bool:
        """Return whether a node stands where it says; before Python 3.12 those in f-strings may not."""
        try:
            return ast.dump(parse(f"({self.code(node)})").body[0].value) == ast.dump(node)  # type: ignore[attr-defined]
        except (SyntaxError, ValueError):
            return False

    # -- comments and layout -----------------------------------------------------------------------------

    def comments(self, start: int, end: int) -> list[str]:
        """Return the comments between two positions, of which the first is not inside a token."""
        return comments(self.text[start:end])

    @property
    def indent_unit(self) -> str:
        """What the first indented block of the file is indented by; four spaces where there is none."""
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if isinstance(node, ast.stmt) and isinstance(body, list) and body[0].lineno > node.lineno:
                inner, outer = (self._indentation(statement) for statement in (body[0], node))
                if inner.startswith(outer) and len(inner) > len(outer):
                    return inner.removeprefix(outer)
        return "    "

    def _indentation(self, statement: ast.stmt) -> str:
        start, _ = self.span(statement)
        return self.text[self.line_start(start) : start]


class Located(Protocol):
    """Where a node stands, as `ast` counts: lines from 1, columns from 0 in bytes of UTF-8."""

    lineno: int
    col_offset: int
    end_lineno: int
    end_col_offset: int


def located(node: ast.AST) -> Located:
    """Return a node by its place, which all nodes have that come from a text, but for the module and operators."""
    return cast("Located", node)


def parse(text: str) -> ast.Module:
    """Parse, without warnings of old escapes and comparisons, which are the script's own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def comments(text: str) -> list[str]:
    """Return the comments in a piece of code."""
    texts = []
    if "#" in text:
        try:
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.COMMENT:
                    texts.append(token.string)
        except (tokenize.TokenError, SyntaxError):
            pass  # of a piece that ends in the middle of something
    return texts
