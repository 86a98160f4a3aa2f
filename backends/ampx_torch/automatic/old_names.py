"""`import apex` in a script that `ampx run` runs: ampx's own, from the moment the script asks for it."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from ampx_torch.apex import ApexPresentError, install, uninstall

from .managing import Manager

_NAMES: Final = ("apex", "amp_C", "apex_C")


class _Finder(importlib.abc.MetaPathFinder):
    """Installs the old names when the first of them is asked for; an apex that still has amp is left alone."""

    def __init__(self) -> None:
        self.asked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NAMES or self.asked:
            return None
        self.asked = True
        try:
            install()
        except ApexPresentError:
            return None
        provided = sys.modules.get(fullname)
        return None if provided is None else ModuleSpec(fullname, _Provided(provided), is_package=True)


class _Provided(importlib.abc.Loader):
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it ran when it was made


@contextmanager
def old_names(manager: Manager) -> Iterator[None]:
    """Let the script import apex."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        if finder.asked:
            uninstall()
