"""Take away imports that nothing uses any more, and import ampx."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from ampx.syntax.program import Program, import_key
from ampx.syntax.source import Source

from .edits import Edits

_FRAMEWORKS: Final = {"torch", "torchvision", "apex", "mxnet", "paddle", "tensorflow", "keras"}
_OURS: Final = {"ampx", "ampx_apex", "ampx_fluid", "ampx_mxnet", "ampx_paddle", "ampx_tensorflow", "ampx_torch"}
Key = tuple[str, str]


def fix(before: Edits, roots: Mapping[str, bool], more: Mapping[str, str]) -> Source:
    """Return an edited file with its imports in order, and `more` modules at the top, each with a comment for the line.

    What is imported from `roots`, full names of the old modules, goes when nothing uses it any more; their values say
    whether `import ampx` takes the place of such an import in a `try` or a function.
    """
    after = _Imports(before.source.with_text(before.apply()))
    gone = {key for key in _used_imports(before) if _root(key, roots) is not None and not after.uses.get(key, 1)}
    in_place = {key for key in gone if roots[str(_root(key, roots))]}
    first = after.remove(gone, in_place)
    text = after.edits.apply()
    if (first is not None or not after.placed) and after.uses_ampx:
        if first is not None and not after.keeps_framework:  # nothing to sort it by
            after = _Imports(after.source)
            after.remove(gone, in_place, at=first.lineno)
            text = after.edits.apply()
        else:
            text = _at_top(after.source.with_text(text), "ampx")
    source = after.source.with_text(text)
    for name, comment in sorted(more.items()):
        source = source.with_text(_at_top(source, name, comment))
    return source


def _used_imports(edits: Edits) -> list[Key]:
    return [key for key, count in edits.program.uses_of_imports(edits.source.tree).items() if count]


def _root(key: Key, roots: Iterable[str]) -> str | None:
    return next((root for root in roots if f"{key[1]}.".startswith(f"{root}.")), None)


class _Imports:
    """The imports of a file that is edited already."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.program = Program()
        self.program.add(source)
        self.edits = Edits(self.program, source)
        self.uses = self.program.uses_of_imports(source.tree)
        self.placed = False
        self.removed: set[ast.stmt] = set()

    @property
    def uses_ampx(self) -> bool:
        """Whether the code uses ampx."""
        return any(name.id == "ampx" for name in self.program.every(ast.Name))

    @property
    def keeps_framework(self) -> bool:
        """Whether a framework is still imported at the top level."""
        top = (statement for statement in self.source.tree.body if statement not in self.removed)
        return any(_imports_any(statement, _FRAMEWORKS) for statement in top)

    def remove(self, gone: Set[Key], in_place: Set[Key], at: int | None = None) -> ast.stmt | None:
        """Take names out of the imports; return the first statement of the module that lost one.

        Below the top level `import ampx` stands in place of some; at the top level in place of the import in line
        `at`.
        """
        first: ast.stmt | None = None
        for statement in self.program.imports(self.source.tree):
            kept = [alias for alias in statement.names if import_key(statement, alias) not in gone]
            if len(kept) == len(statement.names):
                continue
            keys = {import_key(statement, alias) for alias in statement.names} & gone
            is_top = isinstance(self.program.parent(statement), ast.Module)
            if is_top:
                first = first or statement
            wanted = statement.lineno == at if is_top else bool(keys & in_place)
            self.placed = self.placed or wanted
            self._shorten(statement, kept, wanted)
        return first

    def _shorten(self, statement: ast.Import | ast.ImportFrom, kept: Sequence[ast.alias], wanted: bool) -> None:
        if not kept:
            if wanted:
                self.edits.statement(statement, lambda: "import ampx")
            else:
                self.edits.remove(statement)
                self.removed.add(statement)
            return
        if wanted:
            self.edits.insert_before(statement, "import ampx")
        self.edits.small_statement(statement, self._without(statement, kept))

    def _without(self, statement: ast.Import | ast.ImportFrom, kept: Sequence[ast.alias]) -> str:
        """Return the text of an import with only some of its names."""
        spans = [self.source.span(alias) for alias in statement.names]
        cuts, end = [], 0
        for index, alias in enumerate(statement.names):
            if alias in kept:
                end = spans[index][1]
            elif index + 1 < len(spans):
                cuts.append((spans[index][0], spans[index + 1][0]))
            else:
                cuts.append((end, spans[index][1]))
        position, stop = self.source.span(statement)
        pieces = []
        for first, last in sorted(cuts):
            pieces.append(self.source.text[position : max(first, position)])
            position = max(last, position)
        return "".join([*pieces, self.source.text[position:stop]])


def _at_top(source: Source, name: str, comment: str = "") -> str:
    """Import a module behind others of ampx, or before the framework, or after the docstring and `__future__`."""
    body, text = source.tree.body, source.text
    line = f"import {name}  {comment}".rstrip() + source.newline
    if any(_imports_plainly(statement, name) for statement in body):
        return text
    ours = [statement for statement in body if _imports_any(statement, _OURS)]
    if ours:
        at = source.next_line(source.span(ours[-1])[1])
        if at == len(text) and not text.endswith(("\n", "\r")):
            return f"{text}{source.newline}{line.rstrip()}"
    else:
        frameworks = [statement for statement in body if _imports_any(statement, _FRAMEWORKS)]
        rest = frameworks or body[_after_docstring(body) :]
        at = source.line_start(source.span(rest[0])[0]) if rest else len(text)
    return text[:at] + line + text[at:]


def _imports_plainly(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Import) and any(a.name == name and not a.asname for a in statement.names)


def _after_docstring(body: Sequence[ast.stmt]) -> int:
    position = 0
    for index, statement in enumerate(body):
        docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if docstring or future:
            position = index + 1
    return position


def _imports_any(statement: ast.stmt, modules: Set[str]) -> bool:
    names: list[str] = []
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom) and not statement.level:
        names = [statement.module or ""]
    return any(name.partition(".")[0] in modules for name in names)
