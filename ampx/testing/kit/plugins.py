"""A plugin costs nothing until its framework is asked for, and never changes the process around it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import ClassVar

import ampx
from ampx import plugins
from ampx.plugins import Registry

# What importing, loading and using a plugin must not change.
_WATCH = """
import locale, os, random, sys, warnings
def world():
    return dict(os.environ), random.getstate(), list(warnings.filters), os.getcwd(), sys.getrecursionlimit(), \
locale.setlocale(locale.LC_ALL), sys.excepthook, list(sys.path)
"""
_LIGHT = """
import importlib, sys
import ampx
plugin = importlib.import_module({plugin!r})
calls = []
plugin.ampx_register_backends(register=lambda *args, **kwargs: calls.append(args))
assert calls, "nothing was registered"
heavy = [name for name in {modules!r} if name in sys.modules]
assert not heavy, f"importing the plugin imported {{heavy}}"
"""
_QUIET = """
import importlib
import ampx
before = world()
ampx.register_plugin(importlib.import_module({plugin!r}), "kit") if {framework!r} not in ampx.backends() else None
importlib.import_module({plugin!r})
assert world() == before, "importing the plugin changed the process"
"""
_USE = """
for name in {modules!r}:
    importlib.import_module(name)
before = world()
from ampx.plugins import default_registry
backend = default_registry().load({framework!r})
level = "O1" if "O1" in backend.capabilities.levels else "O0"
warnings_before = list(warnings.filters)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ampx.init({framework!r}, level=level).shutdown()
assert world() == before, "using the backend changed the process"
"""


class PluginSuite:
    """Tests of one plugin; subclass it as `TestPlugin`.

    Attributes:
        plugin: Import name of the plugin's module.
        framework: The name that it registers.
        modules: Modules that importing the plugin must not import, and that the framework consists of.
    """

    plugin: ClassVar[str]
    framework: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]

    def test_importing_the_plugin_imports_no_framework(self) -> None:
        """In a fresh process, import and registration leave the framework alone."""
        self._run(_LIGHT)

    def test_importing_the_plugin_changes_nothing(self) -> None:
        """Environment, random state, warning filters, path and locale are as before."""
        self._run(_WATCH + _QUIET)

    def test_using_the_backend_changes_nothing(self) -> None:
        """So they are after the backend was loaded, a session started and ended."""
        self._run(_WATCH + _QUIET + _USE)

    def test_the_plugin_registers_its_framework(self) -> None:
        """Under its name, with roots and a requirement, by hooks that exist; loading waits to be asked."""
        registry = Registry(entry_points=())
        registry.register_plugin(self._module(), "kit")
        registration = registry.registration(self.framework)
        assert registration.roots
        assert all(isinstance(root, str) and root for root in registration.roots)
        assert isinstance(registration.requires, str)
        assert registration.requires
        assert callable(registration.load)

    def test_the_plugin_implements_only_hooks(self) -> None:
        """Every marked function is a hook of ampx."""
        marked = [name for name in dir(self._module()) if hasattr(getattr(self._module(), name), "ampx_impl")]
        assert "ampx_register_backends" in marked
        assert set(marked) <= {name for name in vars(plugins) if name.startswith("ampx_")}

    def test_the_backend_loads(self) -> None:
        """The loader gives a backend of that name, and the same one again."""
        registry = Registry(entry_points=())
        registry.register_plugin(self._module(), "kit")
        backend = registry.load(self.framework)
        assert isinstance(backend, ampx.Backend)
        assert backend.name == self.framework
        assert registry.load(self.framework) is backend

    def _module(self) -> object:
        return importlib.import_module(self.plugin)

    def _run(self, script: str) -> None:
        """Run a script in a fresh interpreter."""
        text = script.format(plugin=self.plugin, framework=self.framework, modules=self.modules)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
