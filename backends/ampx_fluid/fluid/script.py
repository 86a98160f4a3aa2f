"""Names of fluid that a script asks for later: looked for in its source before its first program runs.

A script that fails where it saves its model has lost its training. So its source is read when the first program runs:
for attributes of `paddle.fluid` and names imported from it which the alias does not have.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ampx.errors import AmpxWarning

from .missing import ALIAS, FluidNameError

_CAUGHT: Final = frozenset(("AttributeError", "ImportError", "ModuleNotFoundError", "Exception", "BaseException"))
_ENDS: Final = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class _Looked:
    """What was looked at since `install`."""

    files: frozenset[str] = frozenset()
    modules: int = 0


def check_callers() -> None:
    """Look through the script and the modules beside it, each once.

    Warns:
        AmpxWarning: There is such a name on a way that depends on a condition.
    """
    if len(sys.modules) == _Looked.modules:  # asked at every run of a program
        return
    _Looked.modules = len(sys.modules)
    missing = missing_names([path for path in _script_files() if str(path) not in _Looked.files])
    _Looked.files |= {str(path) for path in _script_files()}
    certain = [use for use in missing if use.certain]
    possible = [use for use in missing if not use.certain]
    if possible:
        warnings.warn(
            f"the script names what is not in the alias of paddle.fluid that ampx offers, and would stop there: "
            f"{_listed(possible)}",
            AmpxWarning,
            stacklevel=3,
        )
    if certain:
        raise FluidNameError(
            f"the script would stop after what it has trained, at names that are not in the alias of paddle.fluid that "
            f"ampx offers: {_listed(certain)}; accepted: the names that dir(fluid) and its modules list. Nothing has "
            f"run yet: use one of these, or what Paddle 3 has for it, or leave the lines out."
        )


def forget() -> None:
    """Look at every file anew."""
    _Looked.files, _Looked.modules = frozenset(), 0


@dataclass(frozen=True)
class Use:
    """One place in a script."""

    file: str
    line: int
    name: str  # the name, such as `"fluid.io.no_such"`
    certain: bool  # the script comes there whatever its conditions say


def missing_names(files: list[Path]) -> list[Use]:
    """List the names of fluid in some files of a script that the alias does not have."""
    sources = []
    for path in files:
        try:
            sources.append(_Source(str(path), ast.parse(path.read_text(encoding="utf-8"))))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # what Python could run from elsewhere cannot be read here
    functions: dict[str, list[tuple[_Source, ast.AST]]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.setdefault(node.name, []).append((source, node))
    reader = _Reader(functions)
    for source in sources:
        reader.read_block(source, source.tree.body, True)
    return sorted(reader.uses.values(), key=lambda use: (use.file, use.line, use.name))


def _script_files() -> Iterator[Path]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return
    folder = Path(main).resolve().parent
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            path = Path(file).resolve()
            if path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(path.parts):
                yield path


def _listed(uses: list[Use]) -> str:
    return ", ".join(f"{use.name} ({Path(use.file).name}:{use.line})" for use in uses)


@dataclass
class _Source:
    """One file, and what its names stand for, such as `{"fluid": "paddle.fluid"}`."""

    file: str
    tree: ast.Module
    aliases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == "paddle":
                        self.aliases[alias.asname or "paddle"] = alias.name if alias.asname else "paddle"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paddle":
                for alias in node.names:
                    self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def dotted(self, node: ast.AST) -> str:
        """Return what an expression names in full, such as `"paddle.fluid.io.save"`; "" for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        root = self.aliases.get(node.id, "") if isinstance(node, ast.Name) else ""
        return ".".join([root, *reversed(parts)]) if root else ""


class _Reader:
    """Goes through statements as they would run, and into the functions that they name."""

    def __init__(self, functions: dict[str, list[tuple[_Source, ast.AST]]]) -> None:
        self.uses: dict[tuple[str, int, str], Use] = {}
        self._functions = functions
        self._entered: dict[int, bool] = {}

    def read_block(self, source: _Source, block: list[Any], certain: bool) -> None:
        for statement in block:
            self._read(source, statement, certain)
            if isinstance(statement, _ENDS):
                return

    def _read(self, source: _Source, node: ast.AST, certain: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in (*node.decorator_list, node.args):  # the body runs when it is called
                self._read(source, part, certain)
        elif isinstance(node, ast.If):
            self._read_if(source, node, certain)
        elif isinstance(node, ast.Try):
            self._read_try(source, node, certain)
        elif isinstance(node, ast.IfExp):
            self._read(source, node.test, certain)
            self._read(source, node.body, False)
            self._read(source, node.orelse, False)
        elif isinstance(node, (ast.While, ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)):
            for name, value in ast.iter_fields(node):
                if name in ("body", "orelse"):
                    self.read_block(source, value, certain)
                else:
                    self._read_value(source, value, certain)
        else:
            self._look(source, node, certain)
            for _, value in ast.iter_fields(node):
                self._read_value(source, value, certain and not isinstance(node, (ast.BoolOp, ast.Match)))

    def _read_value(self, source: _Source, value: Any, certain: bool) -> None:
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                self._read(source, node, certain)

    def _read_if(self, source: _Source, node: ast.If, certain: bool) -> None:
        self._read(source, node.test, certain)
        asked = [name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)]
        if "hasattr" not in asked:
            self.read_block(source, node.body, certain and asked == ["__name__"])
        self.read_block(source, node.orelse, False)

    def _read_try(self, source: _Source, node: ast.Try, certain: bool) -> None:
        kinds = [handler.type for handler in node.handlers]
        caught = {name.id for kind in kinds if kind for name in ast.walk(kind) if isinstance(name, ast.Name)}
        if None not in kinds and not caught & _CAUGHT:
            self.read_block(source, node.body, certain)
        for handler in node.handlers:
            self.read_block(source, handler.body, False)
        self.read_block(source, node.orelse, certain)
        self.read_block(source, node.finalbody, certain)

    def _look(self, source: _Source, node: ast.AST, certain: bool) -> None:
        """Note a missing name, and enter the functions of a name that is read."""
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                self._note(source, node.lineno, f"{node.module}.{alias.name}", certain)
        elif isinstance(node, ast.Attribute):
            self._note(source, node.lineno, source.dotted(node), certain)
            self._enter(node.attr, certain)
        elif isinstance(node, ast.Name):
            self._enter(node.id, certain)

    def _enter(self, name: str, certain: bool) -> None:
        for source, node in self._functions.get(name, ()):
            if self._entered.get(id(node)) not in (True, certain):
                self._entered[id(node)] = certain
                self.read_block(source, getattr(node, "body", []), certain)

    def _note(self, source: _Source, line: int, name: str, certain: bool) -> None:
        missing = _first_missing(name)
        if missing:
            key = source.file, line, missing
            before = self.uses.get(key)
            self.uses[key] = Use(source.file, line, missing, certain or (before is not None and before.certain))


def _first_missing(name: str) -> str:
    """Return the part of a dotted name, up to what a module of the alias does not have; "" where all is there."""
    if not name.startswith("paddle.fluid."):
        return ""
    here: Any = sys.modules[ALIAS]
    path = "fluid"
    for part in name.removeprefix("paddle.fluid.").split("."):
        if not (isinstance(here, ModuleType) and here.__name__.startswith(ALIAS)) or not part or part == "*":
            return ""
        path += f".{part}"
        if not hasattr(here, part):
            return path
        here = getattr(here, part)
    return ""
