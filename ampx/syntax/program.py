"""Some files of one program: the nodes around each node, and what each name means, across imports."""

from __future__ import annotations

import ast
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from .source import Source, located

Node = TypeVar("Node", bound=ast.AST)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Reference: TypeAlias = ast.Name | ast.Attribute

FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_IMPORTS: Final = re.compile(
    rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n#;]+)|import[ \t]+([^\n#;]+))", flags=re.M
)


@dataclass(frozen=True)
class Definition:
    """A place where a name gets its value."""

    node: ast.AST  # the name, parameter, function, class or import
    imported: str | None = None  # for an import, the full name of what is imported


@dataclass(eq=False)
class Scope:
    """The names of a module, class, function, lambda or comprehension."""

    node: ast.AST
    outer: Scope | None
    names: dict[str, list[Definition]] = field(default_factory=dict)
    imports: dict[str, list[Definition]] = field(default_factory=dict)
    elsewhere: dict[str, Scope] = field(default_factory=dict)  # of `global` and `nonlocal`

    def find(self, name: str) -> Scope | None:
        """Return the scope that a name used here belongs to; None where nothing defines it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.elsewhere:
                return scope.elsewhere[name].find(name)
            if name in scope.names and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope
            scope = scope.outer
        return None

    def define(self, name: str, definition: Definition) -> None:
        """Note one more definition of a name."""
        home = self.elsewhere.get(name, self)
        home.names.setdefault(name, []).append(definition)
        if definition.imported is not None:
            home.imports.setdefault(name, []).append(definition)


class Modules:
    """The files of a tree, and which of them an import means."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._paths = {os.path.abspath(path): path for path in paths}
        self._words = {word for path in self._paths for word in os.path.splitext(path)[0].split(os.sep)}
        self._known: dict[tuple[str, str], tuple[Path, list[str]] | None] = {}

    def find(self, name: str, importer: Path) -> tuple[Path, list[str]] | None:
        """Return the file that holds a full name, and what of the name is left for the object in it.

        The name has leading dots where the importer imports it relatively.
        """
        key = name, os.path.dirname(os.path.abspath(importer))
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, name: str, here: str) -> tuple[Path, list[str]] | None:
        parts = name.lstrip(".").split(".")
        level = len(name) - len(name.lstrip("."))
        if level:
            for _ in range(level - 1):
                here = os.path.dirname(here)
            return self._below(here, [part for part in parts if part])
        if parts[0] not in self._words:  # most imports: not of this tree
            return None
        while True:
            for base in (here, os.path.join(here, "src")):
                match = self._below(base, parts)
                if match is not None and match[1] != parts:
                    return match
            outer = os.path.dirname(here)
            if outer == here:
                return None
            here = outer

    def _below(self, base: str, parts: list[str]) -> tuple[Path, list[str]] | None:
        for count in range(len(parts), -1, -1):
            stem = os.path.join(base, *parts[:count])
            candidates = (f"{stem}.py", os.path.join(stem, "__init__.py")) if count else (f"{stem}/__init__.py",)
            for candidate in candidates:
                if candidate in self._paths:
                    return self._paths[candidate], parts[count:]
        return None


def imported_names(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the full names that a file seems to import and what it calls them, without parsing it."""
    for match in _IMPORTS.finditer(data):
        module, names, modules = (None if part is None else part.decode(errors="replace") for part in match.groups())
        listed = re.sub(r"#[^\n]*|[()\\]", " ", str(modules if modules is not None else names))
        for words in map(str.split, listed.split(",")):
            if words:
                dot = "" if modules is not None or str(module).endswith(".") else "."
                yield f"{module or ''}{dot}{words[0]}", words[-1]


def import_graph(data: Mapping[Path, bytes], modules: Modules) -> dict[Path, list[Path]]:
    """Return which files of a tree each file imports from; a name that is passed on is of the file that has it."""
    names = {path: list(imported_names(content)) for path, content in data.items()}

    def home(name: str, importer: Path, depth: int) -> Iterator[Path]:
        match = modules.find(name, importer)
        if match is None:
            return
        path, rest = match
        others = names.get(path, []) if depth else []  # nothing is passed on by files that are not looked at
        passed_on = [full for full, bound in others if rest and bound in (rest[0], "*")]
        for full in passed_on:
            yield from home(full if full.endswith("*") else ".".join([full, *rest[1:]]), path, depth - 1)
        if not passed_on:
            yield path

    return {
        path: list(dict.fromkeys(file for full, _ in names[path] for file in home(full, path, 8) if file != path))
        for path in data
    }


def beside(importer: Path, data: bytes) -> Iterator[Path]:
    """Yield the files that a file imports from its own folder or package, as Python would find them."""
    root = importer.parent
    while (root / "__init__.py").exists():
        root = root.parent
    for name, _ in imported_names(data):
        level = len(name) - len(name.lstrip("."))
        folders = [importer.parents[level - 1]] if 0 < level <= len(importer.parents) else [importer.parent, root]
        parts = name.lstrip(".").split(".")
        for folder in folders:
            for count in range(len(parts), 0, -1):
                stem = folder.joinpath(*parts[:count])
                for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                    if stem.name and path.is_file() and not path.is_symlink():
                        yield path


class Program:
    """Parsed files and the questions that dialects ask about them."""

    def __init__(
        self,
        modules: Modules | None = None,
        load: Callable[[Path], Source | None] | None = None,
        importers: Callable[[Path], Iterable[bytes]] | None = None,
    ) -> None:
        """Start without a file.

        `load` parses a further file, or returns None where it cannot be had; `importers` gives what the files that
        import a file hold, but for those of the program.
        """
        self.sources: list[Source] = []  # the files, in the order in which they were added
        self._modules = modules or Modules()
        self._load = load
        self._importers = importers
        self._by_path: dict[Path, Source | None] = {}
        self._by_tree: dict[ast.AST, Source] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, Scope] = {}  # of names, parameters, and of what has a scope of its own inside
        self._kinds: dict[ast.AST, dict[type[ast.AST], list[Any]]] = {}
        self._sorted: dict[ast.AST, set[type[ast.AST]]] = {}
        self._references: dict[ast.AST, list[tuple[Reference, str]]] = {}

    # -- files -------------------------------------------------------------------------------------------

    def add(self, source: Source) -> None:
        """Take a file in."""
        self.sources.append(source)
        self._by_path[source.path] = source
        self._by_tree[source.tree] = source
        self._sorted[source.tree] = set()
        _Reader(source.tree, self._parents, self._scopes, self._kinds.setdefault(source.tree, {})).read()

    def source(self, node: ast.AST) -> Source:
        """Return the file of a node."""
        return self._by_tree[self.module(node)]

    def module(self, node: ast.AST) -> ast.Module:
        """Return the tree of a node."""
        while not isinstance(node, ast.Module):
            node = self._parents[node]
        return node

    def _file_of(self, name: str, importer: ast.AST) -> tuple[Source, list[str]] | None:
        match = self._modules.find(name, self.source(importer).path)
        if match is None:
            return None
        source = self._by_path.get(match[0])
        return None if source is None else (source, match[1])

    def load(self, node: ast.AST) -> bool:
        """Take in the files that an imported name is defined in; return whether there was a new one."""
        count = len(self.sources)
        for name in self.qualified(node):
            match = self._modules.find(name, self.source(node).path)
            if match is not None and match[0] not in self._by_path and self._load is not None:
                self._by_path[match[0]] = source = self._load(match[0])
                if source is not None:
                    self.add(source)
        return len(self.sources) > count

    def is_used_elsewhere(self, definition: Function | ast.ClassDef) -> bool:
        """Return whether a file that imports this one, and is none of the program, mentions a function or class."""
        importers = () if self._importers is None else self._importers(self.source(definition).path)
        word = re.compile(rb"\b%s\b" % definition.name.encode())
        return any(word.search(data) for data in importers)

    def definitions(self, name: str, importer: ast.AST, depth: int = 8) -> tuple[Scope, str] | None:
        """Return the module scope and the name in it that an imported full name stands for, through re-exports."""
        match = self._file_of(name, importer)
        if match is None or not match[1] or depth == 0:
            return None
        source, (first, *rest) = match
        scope = self._scopes[source.tree]
        for definition in scope.imports.get(first, []):
            return self.definitions(".".join([str(definition.imported), *rest]), source.tree, depth - 1)
        return (scope, first) if first in scope.names and not rest else None

    # -- places ------------------------------------------------------------------------------------------

    def every(self, kind: type[Node], module: ast.Module | None = None) -> list[Node]:
        """Return all nodes of a kind, of one file or of all, in the order of the text."""
        if module is None:
            return [node for source in self.sources for node in self.every(kind, source.tree)]
        nodes = self._kinds[module].get(kind, [])
        if kind not in self._sorted[module]:
            self._sorted[module].add(kind)
            nodes.sort(key=self.order)
        return nodes

    def under(self, root: ast.AST, kind: type[Node]) -> list[Node]:
        """Return the nodes of a kind below a node, itself included."""
        return [node for node in ast.walk(root) if isinstance(node, kind)]

    def order(self, node: ast.AST) -> tuple[int, int]:
        """Return a key by which the nodes of a file sort as they stand in the text."""
        place = located(node)
        return (place.lineno, place.col_offset)

    def end(self, node: ast.AST) -> tuple[int, int]:
        """Return a key that comes after all that is in a node."""
        place = located(node)
        return (place.end_lineno, place.end_col_offset)

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return self.source(node).code(node)

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node around a node; a module's is itself."""
        return self._parents.get(node, node)

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """Return the call of what an expression names; None where it is not called."""
        parent = self.parent(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    def receiving_call(self, value: ast.AST) -> ast.Call | None:
        """Return the call that an expression is passed to; None for anything else."""
        parent = self.parent(value)
        call = self.parent(parent) if isinstance(parent, ast.keyword) else parent
        return call if isinstance(call, ast.Call) and value is not call.func else None

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, from the inside out, the module last."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Return whether a node is another one, or stands in it."""
        return node is outer or any(around is outer for around in self.around(node))

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is or stands in."""
        return next(outer for outer in (node, *self.around(node)) if isinstance(outer, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that holds one."""
        parent = self._parents[statement]
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and any(item is statement for item in value):
                return value
        raise LookupError("a statement in no block")

    def function(self, node: ast.AST) -> Function | ast.Module:
        """Return the function whose body a node stands in, or the module."""
        inner = node
        for outer in self.around(node):
            if isinstance(outer, FUNCTIONS) and any(inner is statement for statement in outer.body):
                return outer
            if isinstance(outer, ast.Module):
                return outer
            inner = outer
        return self.module(node)

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class around a node."""
        return next((outer for outer in self.around(node) if isinstance(outer, ast.ClassDef)), None)

    def loops(self, node: ast.AST) -> list[ast.AST]:
        """Return the loops of the same function around a node."""
        loops: list[ast.AST] = []
        for outer in self.around(node):
            if isinstance(outer, FUNCTIONS):
                break
            if isinstance(outer, (ast.For, ast.AsyncFor, ast.While)):
                loops.append(outer)
        return loops

    def branches(self, node: ast.AST) -> dict[ast.If, bool]:
        """Return for each `if` of the same function around a node whether the node stands where its test holds."""
        parts: dict[ast.If, bool] = {}
        inner = node
        for outer in self.around(node):
            if isinstance(outer, FUNCTIONS):
                break
            if isinstance(outer, ast.If):
                parts[outer] = any(inner is statement for statement in outer.body)
            inner = outer
        return parts

    def is_branched(self, node: ast.AST) -> bool:
        """Return whether a node of a function's body is not always reached: it stands in an `if`, `try` or `match`."""
        kinds = (ast.If, ast.Try, ast.Match)
        home = self.function(node)
        for outer in self.around(node):
            if outer is home:
                return False
            if isinstance(outer, kinds) and not (isinstance(outer, ast.If) and _is_main(outer)):
                return True
        return False

    def in_annotation(self, node: ast.AST) -> bool:
        """Return whether a node stands in an annotation."""
        inner = node
        for outer in self.around(node):
            if inner in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
                return True
            if isinstance(outer, ast.stmt):
                return False
            inner = outer
        return False

    # -- names -------------------------------------------------------------------------------------------

    def scope(self, node: ast.AST) -> Scope:
        """Return the scope a node is looked up in; of a module its own."""
        if isinstance(node, ast.Module):
            return self._scopes[node]
        for outer in (node, *self.around(node)):
            if isinstance(outer, (ast.Name, ast.arg)) and outer in self._scopes:
                return self._scopes[outer]
            if outer is not node and outer in self._scopes:
                return self._scopes[outer]
        raise LookupError("a node outside all scopes")

    def qualified(self, node: ast.AST) -> set[str]:
        """Return the full names that imports make of a reference; empty for what is not imported."""
        if isinstance(node, ast.Attribute):
            return {f"{name}.{node.attr}" for name in self.qualified(node.value)}
        if not isinstance(node, ast.Name):
            return set()
        home = self._scopes[node].find(node.id)
        imports = () if home is None else home.imports.get(node.id, ())
        return {definition.imported for definition in imports if definition.imported is not None}

    def references(self, module: ast.Module | None = None) -> list[tuple[Reference, str]]:
        """Return every use of an imported name with its full name; of `a.b.c` the whole, not its parts."""
        if module is None:
            return [use for source in self.sources for use in self.references(source.tree)]
        if module in self._references:
            return self._references[module]
        uses = self._references[module] = []
        for name in self.every(ast.Name, module):
            if isinstance(name.ctx, ast.Load) and self.qualified(name):
                node: Reference = name
                while isinstance(outer := self.parent(node), ast.Attribute):
                    node = outer
                uses.append((node, "|".join(sorted(self.qualified(node)))))
        return uses

    def imports(self, module: ast.Module) -> list[ast.Import | ast.ImportFrom]:
        """Return the imports of a file, in the order of the text."""
        statements: list[ast.Import | ast.ImportFrom] = [*self.every(ast.Import, module)]
        return sorted([*statements, *self.every(ast.ImportFrom, module)], key=self.order)

    def uses_of_imports(self, module: ast.Module) -> dict[tuple[str, str], int]:
        """Count the uses of every imported name of a file, by the name and what it stands for."""
        counts: dict[tuple[str, str], int] = {}
        for statement in self.imports(module):
            counts |= dict.fromkeys((import_key(statement, alias) for alias in statement.names), 0)
        for name in self.every(ast.Name, module):
            imports = self._imports_of(name) if isinstance(name.ctx, ast.Load) else []
            for alias in imports:
                dots = isinstance(self.parent(alias), ast.Import) and alias.asname is None and "." in alias.name
                if not dots or len(imports) == 1 or self._goes_into(name, alias.name):
                    counts[import_key(self.parent(alias), alias)] += 1
        return counts

    def _imports_of(self, name: ast.Name) -> list[ast.alias]:
        """Return the imports that bind a name where it is used."""
        home = self._scopes[name].find(name.id)
        nodes = [definition.node for definition in home.imports.get(name.id, ())] if home is not None else []
        return [node for node in nodes if isinstance(node, ast.alias)]

    def _goes_into(self, name: ast.Name, module: str) -> bool:
        """Return whether a name is the beginning of a dotted module, or of something in it."""
        node: ast.AST = name
        while isinstance(outer := self.parent(node), ast.Attribute):
            node = outer
        return f"{dotted(node)}.".startswith(f"{module}.")


def import_key(statement: ast.AST, alias: ast.alias) -> tuple[str, str]:
    """Return the name that an import binds or dots, and the full name of what it means."""
    if not isinstance(statement, ast.ImportFrom):
        return alias.asname or alias.name, alias.name
    module = "." * statement.level + (f"{statement.module}." if statement.module else "")
    return alias.asname or alias.name, f"{module}{alias.name}"


def dotted(node: ast.AST | None) -> str | None:
    """Return `a.b.c` as text; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


def called_name(node: ast.AST | None) -> str:
    """Return the last part of what a call calls; "" for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def receiver(node: ast.AST | None) -> ast.expr | None:
    """Return what a method is called on: `a.b` in `a.b.step()`; None for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.value if isinstance(function, ast.Attribute) else None


def keywords(call: ast.Call) -> dict[str | None, ast.expr]:
    """Return the keyword arguments of a call by name; those of `**options` under None."""
    return {keyword.arg: keyword.value for keyword in call.keywords}


def constant(node: ast.AST | None) -> object:
    """Return the value of a constant; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def arguments(call: ast.Call, names: Iterable[str], *more: str) -> dict[str, ast.expr] | None:
    """Return the arguments of a call by name; None where `*args`, `**kwargs`, too many or unknown ones hide them.

    Args:
        call: The call.
        names: Names of the parameters, in their order.
        more: Names of parameters that are passed by keyword only.
    """
    positional = list(names)
    if any(isinstance(value, ast.Starred) for value in call.args) or len(call.args) > len(positional):
        return None
    values = dict(zip(positional, call.args, strict=False)) | keywords(call)
    return {str(name): value for name, value in values.items()} if values.keys() <= {*positional, *more} else None


def decided(test: ast.expr, holds: bool) -> Iterator[tuple[ast.expr, str, bool]]:
    """Yield what is known when a test holds, or does not: parts of it, their text, and whether they hold.

    The negative of a comparison counts as its positive: of `x is not None` the text is that of `x is None`.
    """
    match test:
        case ast.UnaryOp(op=ast.Not()):
            yield from decided(test.operand, not holds)
        case ast.BoolOp():
            if isinstance(test.op, ast.And) is holds:
                for value in test.values:
                    yield from decided(value, holds)
        case ast.Compare(ops=[ast.IsNot()]):
            yield test, ast.unparse(ast.Compare(test.left, [ast.Is()], test.comparators)), not holds
        case ast.Compare(ops=[ast.NotEq()]):
            yield test, ast.unparse(ast.Compare(test.left, [ast.Eq()], test.comparators)), not holds
        case _:
            yield test, ast.unparse(test), holds


def is_none(value: ast.AST | None) -> bool:
    """Return whether an expression is the word None."""
    return isinstance(value, ast.Constant) and value.value is None


def _is_main(node: ast.If) -> bool:
    test = node.test
    return isinstance(test, ast.Compare) and dotted(test.left) == "__name__"


class _Reader:
    """Goes through a tree once, noting parents, scopes and kinds. No recursion: expressions may be deep."""

    def __init__(
        self,
        tree: ast.Module,
        parents: dict[ast.AST, ast.AST],
        scopes: dict[ast.AST, Scope],
        kinds: dict[type[ast.AST], list[Any]],
    ) -> None:
        self._parents, self._scopes, self._kinds = parents, scopes, kinds
        self._module = scopes[tree] = Scope(tree, None)
        self._waiting: list[tuple[ast.AST, Scope]] = [(tree, self._module)]
        self._bodies: deque[tuple[Function, Scope]] = deque()  # read when the names around them are known

    def read(self) -> None:
        waiting, kinds = self._waiting, self._kinds
        while waiting or self._bodies:
            if not waiting:
                function, inner = self._bodies.popleft()
                self._go_on(function, function.body, inner)
            node, scope = waiting.pop()
            kind = type(node)
            nodes = kinds.get(kind)
            if nodes is None:
                nodes = kinds[kind] = []
            nodes.append(node)
            special = self._SPECIAL.get(kind)
            if special is None:
                self._go_on(node, ast.iter_child_nodes(node), scope)
            else:
                special(self, node, scope)

    def _go_on(self, node: ast.AST, children: Iterable[ast.AST], scope: Scope) -> None:
        added = []
        for child in children:
            if not isinstance(child, (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)):
                self._parents[child] = node
                added.append((child, scope))
        self._waiting.extend(reversed(added))

    def _name(self, node: ast.Name, scope: Scope) -> None:
        self._scopes[node] = scope
        if not isinstance(node.ctx, ast.Load):
            scope.define(node.id, Definition(node))

    def _function(self, node: Any, scope: Scope) -> None:
        is_lambda = isinstance(node, ast.Lambda)
        if not is_lambda:
            scope.define(node.name, Definition(node))
        inner = self._scopes[node] = Scope(node, scope)
        self._parents[node.args] = node
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters += [star for star in (node.args.vararg, node.args.kwarg) if star is not None]
        outside = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        for parameter in parameters:
            self._parents[parameter] = node.args
            self._scopes[parameter] = inner
            self._kinds.setdefault(ast.arg, []).append(parameter)
            inner.define(parameter.arg, Definition(parameter))
            if parameter.annotation is not None:
                self._go_on(parameter, [parameter.annotation], scope)
        self._go_on(node.args, outside, scope)
        if is_lambda:
            self._go_on(node, [node.body], inner)
            return
        self._bodies.append((node, inner))
        self._go_on(node, [*node.decorator_list, *([node.returns] if node.returns else [])], scope)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        scope.define(node.name, Definition(node))
        inner = self._scopes[node] = Scope(node, scope)
        self._go_on(node, node.body, inner)
        self._go_on(node, [*node.decorator_list, *node.bases, *node.keywords], scope)

    def _comprehension(self, node: Any, scope: Scope) -> None:
        inner = self._scopes[node] = Scope(node, scope)
        first = node.generators[0]
        self._kinds.setdefault(ast.comprehension, []).extend(node.generators)
        for generator in node.generators:
            self._parents[generator] = node
            self._go_on(generator, [generator.target, *generator.ifs], inner)
            self._go_on(generator, [generator.iter], scope if generator is first else inner)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._go_on(node, results, inner)

    def _walrus(self, node: ast.NamedExpr, scope: Scope) -> None:
        home = scope
        while isinstance(home.node, _COMPREHENSIONS) and home.outer is not None:
            home = home.outer
        self._parents[node.target] = node
        self._name(node.target, home)
        self._kinds.setdefault(ast.Name, []).append(node.target)
        self._go_on(node, [node.value], scope)

    def _import(self, node: Any, scope: Scope) -> None:
        for alias in node.names:
            self._parents[alias] = node
            name = alias.asname or alias.name.partition(".")[0]
            binds_package = isinstance(node, ast.Import) and alias.asname is None
            full = name if binds_package else import_key(node, alias)[1]
            scope.define(name, Definition(alias, full))

    def _elsewhere(self, node: Any, scope: Scope) -> None:
        for name in node.names:
            if isinstance(node, ast.Global):
                scope.elsewhere.update({} if scope is self._module else {name: self._module})
            elif scope.outer is not None and (home := scope.outer.find(name)) is not None:
                scope.elsewhere[name] = home

    def _named(self, node: Any, scope: Scope) -> None:
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if name:
            scope.define(name, Definition(node))
        self._go_on(node, ast.iter_child_nodes(node), scope)

    _SPECIAL: Final[dict[type[ast.AST], Callable[[Any, Any, Scope], None]]] = {
        ast.Name: _name,
        ast.FunctionDef: _function,
        ast.AsyncFunctionDef: _function,
        ast.Lambda: _function,
        ast.ClassDef: _class,
        **dict.fromkeys(_COMPREHENSIONS, _comprehension),
        ast.NamedExpr: _walrus,
        ast.Import: _import,
        ast.ImportFrom: _import,
        ast.Global: _elsewhere,
        ast.Nonlocal: _elsewhere,
        ast.ExceptHandler: _named,
        ast.MatchAs: _named,
        ast.MatchStar: _named,
        ast.MatchMapping: _named,
    }
