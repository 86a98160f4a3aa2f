"""Take away imports that nothing uses any more, and import ampx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import libcst as cst
from libcst import matchers, metadata

from .plan import GONE, without_empty_lines
from .source import Source, count_imported

_FRAMEWORKS: Final = {"torch", "torchvision", "apex", "mxnet", "paddle", "tensorflow", "keras"}

_OURS: Final = {"ampx", "ampx_mxnet", "ampx_paddle", "ampx_tensorflow", "ampx_torch"}


def fix(before: Source, after: cst.Module, roots: Sequence[str], in_place: bool, more: Mapping[str, str]) -> cst.Module:
    """Give the module with its imports in order.

    Args:
        before: The file as it was.
        after: The file with its edits.
        roots: Full names of the old modules; what is imported from them goes when nothing uses it any more.
        in_place: Put `import ampx` where an old import stood in a `try` or a function; otherwise at the top.
        more: Further modules to import at the top, with a comment for the line.
    """
    used_before = {name for name, count in before.imported().items() if count}
    used_after = count_imported(metadata.MetadataWrapper(after).resolve(metadata.ScopeProvider).values())
    gone = {name for name in used_before if name[1].startswith(tuple(roots)) and not used_after.get(name, 1)}
    remover = _Remover(after, gone, in_place)
    made = after.visit(remover)
    at_top = remover.top is not None or not remover.placed
    if at_top and matchers.findall(made, matchers.Name("ampx")):
        if remover.top is not None and not any(map(_imports_framework, made.body)):
            made = after.visit(_Remover(after, gone, in_place, remover.top))  # nothing to sort it by
        else:
            made = _at_top(made, "ampx")
    for name, comment in sorted(more.items()):
        made = _at_top(made, name, comment)
    return made


def _at_top(module: cst.Module, name: str, comment: str = "") -> cst.Module:
    """Import a module before the framework is, or after the docstring and what concerns the future."""
    body = list(module.body)
    if any(_imports_already(one, name) for one in body):
        return module
    line = _import(name)
    if comment:
        space = cst.TrailingWhitespace(cst.SimpleWhitespace("  "), cst.Comment(comment))
        line = line.with_changes(trailing_whitespace=space)
    framework = next((index for index, one in enumerate(body) if _imports_framework(one)), None)
    ours = [index for index, one in enumerate(body) if _imports_any(one, _OURS)]
    if ours:
        body.insert(ours[-1] + 1, line)
        return module.with_changes(body=body)
    position = _after_docstring(body) if framework is None else framework
    if position < len(body):
        following = body[position]
        leading = list(getattr(following, "leading_lines", ()))
        blank = [one for one in leading if one.comment is None]
        if leading and len(blank) == len(leading):
            line = line.with_changes(leading_lines=leading)
            body[position] = following.with_changes(leading_lines=[])
    body.insert(position, line)
    return module.with_changes(body=body)


def _after_docstring(body: Sequence[cst.CSTNode]) -> int:
    position = 0
    for index, one in enumerate(body):
        small = _small(one)
        docstring = index == 0 and isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)
        future = isinstance(small, cst.ImportFrom) and _text(small.module) == "__future__"
        if docstring or future:
            position = index + 1
    return position


def _imports_framework(statement: cst.CSTNode) -> bool:
    return _imports_any(statement, _FRAMEWORKS)


def _imports_any(statement: cst.CSTNode, modules: Set[str]) -> bool:
    small = _small(statement)
    if isinstance(small, cst.Import):
        names = [_text(one.name) for one in small.names]
    else:
        names = [_text(small.module)] if isinstance(small, cst.ImportFrom) and not small.relative else []
    return any(name.partition(".")[0] in modules for name in names)


def _small(statement: cst.CSTNode) -> cst.BaseSmallStatement | None:
    return statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and statement.body else None


def _imports_already(statement: cst.CSTNode, name: str) -> bool:
    small: Any = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and statement.body else None
    return isinstance(small, cst.Import) and any(_text(one.name) == name and one.asname is None for one in small.names)


def _import(name: str) -> cst.SimpleStatementLine:
    return cst.SimpleStatementLine(body=[cst.Import(names=[cst.ImportAlias(name=_dotted(name))])])


def _dotted(name: str) -> cst.Name | cst.Attribute:
    outer, _, last = name.rpartition(".")
    return cst.Attribute(_dotted(outer), cst.Name(last)) if outer else cst.Name(last)


def _text(node: cst.CSTNode | None) -> str:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{_text(node.value)}.{node.attr.value}"
    return ""


class _Remover(cst.CSTTransformer):
    """Drops aliases; where a whole statement goes, `import ampx` may take its place."""

    def __init__(
        self, module: cst.Module, gone: set[tuple[str, str]], in_place: bool, here: cst.CSTNode | None = None
    ) -> None:
        super().__init__()
        self._gone = gone
        self._in_place = in_place
        self._here = here
        self._lines = set(module.body)
        self.placed = 0
        self.top: cst.CSTNode | None = None  # the first line of the module that lost something

    def _key(self, statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> tuple[str, str]:
        full = _text(alias.name)
        name = alias.evaluated_alias or full
        if isinstance(statement, cst.ImportFrom):
            full = f"{'.' * len(statement.relative)}{_text(statement.module)}.{full}"
        return name, full

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        made = super().on_leave(original_node, updated_node)
        return without_empty_lines(made) if isinstance(made, (cst.IndentedBlock, cst.Module)) else made

    def leave_SimpleStatementLine(  # noqa: N802 -- LibCST calls it by this name
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        small = original_node.body[0] if len(original_node.body) == 1 else None
        if not isinstance(small, (cst.Import, cst.ImportFrom)) or isinstance(small.names, cst.ImportStar):
            return updated_node
        kept = [one for one in small.names if self._key(small, one) not in self._gone]
        if len(kept) == len(small.names):
            return updated_node
        if original_node in self._lines:
            self.top = self.top or original_node
            wanted = original_node is self._here
        else:
            wanted = self._in_place
        place = [_import("ampx")] if wanted else []
        self.placed += len(place)
        if not kept:
            if place:
                changed = {
                    "leading_lines": updated_node.leading_lines,
                    "trailing_whitespace": updated_node.trailing_whitespace,
                }
                return place[0].with_changes(**changed)
            return updated_node.with_changes(body=[GONE])
        kept[-1] = kept[-1].with_changes(comma=small.names[-1].comma)
        rest: Any = updated_node.with_changes(body=[small.with_changes(names=kept)])
        if not place:
            return rest
        first = place[0].with_changes(leading_lines=updated_node.leading_lines)
        return cst.FlattenSentinel([first, rest.with_changes(leading_lines=[])])
