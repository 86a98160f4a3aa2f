"""Modules that can be imported by a second name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any


class Aliases(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """A finder for `sys.meta_path`, before those of Python: another name gives the module itself, and no second copy.

    Args:
        names: Modules, or objects in them as `"module:object"`, by their other names. What is below a module is below
            its other name. Nothing is imported before a script asks for it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what a name stands for."""
        name = self.resolve(fullname)
        if name is None:
            return None
        spec = None if ":" in name else importlib.util.find_spec(name)
        if spec is None and ":" not in name:
            return None
        return ModuleSpec(fullname, self, is_package=spec is not None and spec.submodule_search_locations is not None)

    def resolve(self, fullname: str) -> str | None:
        """Return the name of the module that a name stands for; None for a name of others."""
        head, below = fullname, ""
        while head:
            if head in self.names:
                return self.names[head] + below
            head, dot, last = head.rpartition(".")
            below = f"{dot}{last}{below}"
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module itself in place of the empty one that Python has made, and likewise all that is below it.

        What is below and has been imported must not be imported again: Python would set it as an attribute of its
        package, where something else may have its name by now.
        """
        other = module.__name__
        own = sys.modules[other] = self._load(other)
        below = f"{own.__name__}."
        for name in [name for name in sys.modules if name.startswith(below)]:
            sys.modules[f"{other}.{name.removeprefix(below)}"] = sys.modules[name]
        for name in self.names:
            if name.startswith(f"{other}."):
                sys.modules[name] = self._load(name)

    def _load(self, fullname: str) -> Any:
        name = self.resolve(fullname)
        assert name is not None
        return pkgutil.resolve_name(name) if ":" in name else importlib.import_module(name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, for `python -m`."""
        spec = importlib.util.find_spec(self.resolve(fullname) or fullname)
        return None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]

    def get_source(self, fullname: str) -> str | None:
        """Return nothing: the source is that of the module itself."""
        return None
