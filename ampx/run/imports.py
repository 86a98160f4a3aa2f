"""Notice when a script has imported a framework, and provide modules that it asks for."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ampx.callers import imported_by_script


class FirstFinder(importlib.abc.MetaPathFinder):
    """A finder that is asked before all others, inside `installed`."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Find inside."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.close()

    def close(self) -> None:
        """Undo what finding changed."""


class ImportWatch(FirstFinder):
    """A finder that finds nothing by itself: it calls back when a watched module has been imported.

    It waits for the end of the outermost watched import, because a framework may import another (Keras does), and
    one that is half imported cannot be automated.
    """

    def __init__(
        self, modules: Mapping[str, str], ready: Callable[[str], None], stand_ins: Mapping[str, str] | None = None
    ) -> None:
        """Remember what to watch.

        Args:
            modules: Framework by the name of a top-level module that belongs to it. A framework is imported when the
                first of its modules is; the others (Keras) import that one while they are half imported themselves.
            ready: Called with each framework whose import is complete, once.
            stand_ins: Module to import first, by the name of one that it can provide.
        """
        self._modules = modules
        self._ready = ready
        self._stand_ins = stand_ins or {}
        self._searching: set[str] = set()
        self._depth = 0
        self._told: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a watched module as the others do, and look over its loader's shoulder."""
        if fullname in self._searching or not (fullname in self._modules or fullname in self._stand_ins):
            return None
        self._searching.add(fullname)
        try:
            if fullname in self._stand_ins:
                return self._stand_in(fullname, self._stand_ins[fullname])
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Watched(spec.loader, self)
        return spec

    def _stand_in(self, fullname: str, provider: str) -> importlib.machinery.ModuleSpec | None:
        if provider in sys.modules or not imported_by_script() or importlib.util.find_spec(provider) is None:
            return None
        return spec_of(fullname, lambda: importlib.import_module(provider))  # its backend knows the name from then on

    def look(self) -> None:
        """Report every framework that is imported and was not told of."""
        if self._depth:
            return
        first = {framework: module for module, framework in reversed(list(self._modules.items()))}
        for framework, module in first.items():
            if module in sys.modules and framework not in self._told and not self._is_half_imported(module):
                self._told.add(framework)
                self._ready(framework)

    def _is_half_imported(self, module: str) -> bool:
        """Return whether a module's import still runs; where it does, look again when it ends."""
        spec: Any = getattr(sys.modules[module], "__spec__", None)
        if not getattr(spec, "_initializing", False):
            return False
        if type(spec) is importlib.machinery.ModuleSpec:
            _NoticedSpec.notice(spec, self.look)
        return True

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Note that a watched import runs."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class _NoticedSpec(importlib.machinery.ModuleSpec):
    """The spec of a half-imported module, which calls back when Python notes in it that the import has ended."""

    @classmethod
    def notice(cls, spec: Any, ended: Callable[[], None]) -> None:
        """Have a spec call `ended` once, at the end of its module's import."""
        spec.__class__ = cls
        spec.ended = ended

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            ended = self.__dict__.pop("ended")
            object.__setattr__(self, "__class__", importlib.machinery.ModuleSpec)
            ended()


class _Watched(importlib.abc.Loader):
    """A loader that tells when it is done; the module gets the true one."""

    def __init__(self, loader: Any, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Make the module as the true loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then look which framework is complete."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with self._watch.importing():
            self._loader.exec_module(module)
        self._watch.look()


class ImportAlias(FirstFinder):
    """Provides modules under names of others, once the script imports one of these.

    Looking whether a name is there (`importlib.util.find_spec`) changes nothing. A library that looks, or tries to
    import a name for itself, is told what plain Python tells it: it must not choose other code than it has there.
    """

    def __init__(
        self,
        names: Sequence[str],
        install: Callable[[str], None],
        uninstall: Callable[[], None],
        through: tuple[str, ...] = (),
    ) -> None:
        """Take what there is to provide.

        Args:
            names: The names; what is below one of them is asked for by importing it.
            install: Puts all of them into `sys.modules`, or nothing where another package provides them.
            uninstall: Undoes that.
            through: Modules, by how their names begin, that import what the script tells them to.
        """
        self.provided = False  # the script imported one of the names
        self._names = names
        self._install = install
        self._uninstall = uninstall
        self._through = through

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the names, for the script."""
        if self.provided or fullname not in self._names or not self.asked_by_script():
            return None
        return spec_of(fullname, lambda: self._provide(fullname))

    def asked_by_script(self) -> bool:
        """Return whether the script asks, and not a library for itself."""
        return imported_by_script(self._through)

    def _provide(self, name: str) -> None:
        if not self.provided:
            self.provided = True
            self._install(name)

    def close(self) -> None:
        """Take the names away again, where the script imported one."""
        if self.provided:
            self._uninstall()


def spec_of(name: str, provide: Callable[[], object]) -> importlib.machinery.ModuleSpec:
    """Return the spec of a module that others can import once `provide` was called; importing calls it."""
    return importlib.machinery.ModuleSpec(name, _Provider(provide), is_package=True)


class _Provider(importlib.abc.Loader):
    """Loads a module that can be imported by now, and leaves it its own spec."""

    def __init__(self, provide: Callable[[], object]) -> None:
        self._provide = provide
        self._own: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self._provide()
        module = importlib.import_module(spec.name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # it ran when it was made
