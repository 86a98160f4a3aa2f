"""One parsed file, and the questions dialects ask about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

import libcst as cst
from libcst import metadata

Node = TypeVar("Node", bound=cst.CSTNode)
Statement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
Reference: TypeAlias = cst.Name | cst.Attribute

_PROVIDERS: Final = (
    metadata.ScopeProvider,
    metadata.QualifiedNameProvider,
    metadata.PositionProvider,
    metadata.ParentNodeProvider,
)


class Source:
    """A syntax tree with what LibCST knows about its names.

    Attributes:
        module: The tree whose nodes all answers are about.
        nodes: Every node, in the order of the text.
    """

    def __init__(self, module: cst.Module) -> None:
        """Resolve names, scopes, positions and parents."""
        wrapper = metadata.MetadataWrapper(module)
        self.module = wrapper.module
        wrapper.resolve_many(_PROVIDERS)  # all in one pass
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self._scopes = wrapper.resolve(metadata.ScopeProvider)
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self.nodes: list[cst.CSTNode] = list(_walk(self.module))
        self._order = {node: index for index, node in enumerate(self.nodes)}

    def every(self, kind: type[Node]) -> list[Node]:
        """Give all nodes of a kind, in the order of the text."""
        return [node for node in self.nodes if isinstance(node, kind)]

    def under(self, root: cst.CSTNode, kind: type[Node]) -> list[Node]:
        """Give the nodes of a kind below a node, itself included."""
        return [node for node in _walk(root) if isinstance(node, kind)]

    def everything_under(self, root: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Give a node and all below it."""
        return _walk(root)

    def line(self, node: cst.CSTNode) -> int:
        """Give the line a node starts on."""
        return int(self._positions[node].start.line)

    def column(self, node: cst.CSTNode) -> int:
        """Give the column a node starts at."""
        return int(self._positions[node].start.column)

    def order(self, node: cst.CSTNode) -> int:
        """Give a number by which nodes sort as they stand in the text."""
        return self._order[node]

    def code(self, node: cst.CSTNode) -> str:
        """Give the text of a node."""
        return self.module.code_for_node(node)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Give the node around a node; the module's is itself."""
        return self._parents.get(node, self.module)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Give the nodes around a node, from the inside out, the module last."""
        while node is not self.module:
            node = self.parent(node)
            yield node

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Tell whether a node is another one, or stands in it."""
        return node is outer or any(one is outer for one in self.around(node))

    def statement(self, node: cst.CSTNode) -> Statement:
        """Give the line or compound statement that a node stands in."""
        for one in (node, *self.around(node)):
            if isinstance(one, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                return one
        raise LookupError("a node outside all statements")

    def block(self, statement: cst.CSTNode) -> cst.CSTNode:
        """Give the indented block or module that holds a statement."""
        return self.parent(statement)

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Module:
        """Give the function whose body a node stands in, or the module."""
        for one in self.around(node):
            if isinstance(one, cst.FunctionDef):
                return one
        return self.module

    def enclosing_class(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """Give the innermost class around a node."""
        return next((one for one in self.around(node) if isinstance(one, cst.ClassDef)), None)

    def loops(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Give the loops of the same function around a node."""
        found: list[cst.CSTNode] = []
        for one in self.around(node):
            if isinstance(one, cst.FunctionDef):
                break
            if isinstance(one, (cst.For, cst.While)):
                found.append(one)
        return found

    def branches(self, node: cst.CSTNode) -> dict[cst.CSTNode, cst.CSTNode]:
        """Give for every `if` around a node the part of it (body or else) that the node stands in."""
        found: dict[cst.CSTNode, cst.CSTNode] = {}
        inner = node
        for one in self.around(node):
            if isinstance(one, cst.If):
                found[one] = inner
            inner = one
        return found

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """Give the full names that imports make of a reference; empty for what is not imported."""
        found = self._names.get(node, set())
        names = found() if callable(found) else found
        return {one.name for one in names if one.source is metadata.QualifiedNameSource.IMPORT}

    def references(self) -> Iterator[tuple[Reference, str]]:
        """Give every use of an imported name with its full name; of `a.b.c` the whole, not its parts."""
        for node in self.nodes:
            if not isinstance(node, (cst.Name, cst.Attribute)):
                continue
            parent = self.parent(node)
            if isinstance(parent, (cst.Attribute, cst.ImportAlias, cst.ImportFrom, cst.AsName)):
                continue
            if isinstance(parent, (cst.Arg, cst.Param)) and getattr(parent, "keyword", None) is node:
                continue
            names = self.qualified(node)
            if names:
                yield node, min(names) if len(names) == 1 else "|".join(sorted(names))

    def scope(self, node: cst.CSTNode) -> metadata.Scope:
        """Give the scope a node is looked up in."""
        for one in (node, *self.around(node)):
            found = self._scopes.get(one)
            if found is not None:
                return found
        raise LookupError("a node outside all scopes")

    def binds(self, package: str) -> bool:
        """Tell whether the module imports a package, or something in it, so that the package has its own name."""
        return any(
            (one.evaluated_name == package or one.evaluated_name.startswith(f"{package}.")) and one.asname is None
            for line in self.module.body
            for small in (line.body if isinstance(line, cst.SimpleStatementLine) else ())
            if isinstance(small, cst.Import)
            for one in small.names
        )

    def imported(self) -> dict[tuple[str, str], int]:
        """Count the uses of every imported name, by its name and what it stands for."""
        return count_imported(self._scopes.values())

    def names_used(self) -> set[str]:
        """Give every identifier of the file."""
        return {node.value for node in self.nodes if isinstance(node, cst.Name)}


def dotted(node: cst.BaseExpression) -> str | None:
    """Give `a.b.c` as text; None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        inner = dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr.value}"
    return None


def arguments(call: cst.Call, names: Sequence[str]) -> dict[str, cst.BaseExpression] | None:
    """Give the arguments of a call by name; None where `*args`, `**kwargs` or too many hide them."""
    found: dict[str, cst.BaseExpression] = {}
    for position, arg in enumerate(call.args):
        if arg.star:
            return None
        if arg.keyword is None and position >= len(names):
            return None
        found[names[position] if arg.keyword is None else arg.keyword.value] = arg.value
    return found


def only_statement(source: Source, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
    """Give the line that consists of one small statement, which a node is or stands in."""
    line = source.statement(node)
    return line if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None


def as_bool(code: str) -> str:
    """Write code of a switch so that it gives a bool; a comparison or negation does."""
    expression = cst.parse_expression(code)
    if isinstance(expression, (cst.Comparison, cst.UnaryOperation)):
        return code if expression.lpar else f"({code})"
    return code if code in ("True", "False") else f"bool({code})"


def count_imported(scopes: Iterable[metadata.Scope | None]) -> dict[tuple[str, str], int]:
    """Count the uses of every name that is imported in some scopes, by its name and what it stands for."""
    found: dict[tuple[str, str], int] = {}
    for scope in set(scopes):
        for assignment in () if scope is None else scope.assignments:
            if isinstance(assignment, metadata.ImportAssignment):
                for one in assignment.get_qualified_names_for(assignment.name):
                    key = (assignment.name, one.name)
                    found[key] = found.get(key, 0) + len(assignment.references)
    return found


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)
