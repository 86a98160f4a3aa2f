"""One plugin's registration of a framework, and how its backend is loaded."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import hookspecs
from .backend import Backend
from .contract import Capabilities
from .errors import AmpxError, BackendLoadError, FrameworkNotInstalledError, PluginError


@dataclass(frozen=True)
class Registration:
    """What a plugin said about one framework.

    Attributes:
        name: The framework's name.
        load: Gives the backend.
        roots: Root modules of the framework's objects.
        requires: The requirement to install.
        plugin: Name of the plugin.
        module: Name of the plugin's module, for messages.
        stands_in_for: Modules that `ampx run` can provide to a script where they are missing.
    """

    name: str
    load: Callable[[], Backend]
    roots: tuple[str, ...]
    requires: str
    plugin: str
    module: str
    stands_in_for: tuple[str, ...] = ()


def check_registration(name: object, load: object, roots: object, requires: object) -> None:
    """Check what a plugin passes to `register`.

    Raises:
        PluginError: It cannot be meant so.

    Sync: none.
    """
    listed = isinstance(roots, (list, tuple, set, frozenset)) and all(isinstance(root, str) for root in roots)
    texts = isinstance(name, str) and isinstance(requires, str)
    if not (listed and roots and texts and callable(load)):
        raise PluginError(
            f"a plugin called register({name!r}, {load!r}, roots={roots!r}, requires={requires!r}); accepted: a name, "
            f"a function without arguments, a tuple of root module names, and a requirement. Correct the plugin."
        )


def implemented_hooks(plugin: Any) -> list[str]:
    """List the functions of a plugin that carry the marker. Sync: none."""
    marker = f"{hookspecs.PROJECT}_impl"
    functions = [name for name in dir(plugin) if inspect.isroutine(getattr(plugin, name, None))]
    return [name for name in functions if hasattr(getattr(plugin, name), marker)]


def load_backend(found: Registration) -> Backend:
    """Load a framework's backend.

    Raises:
        FrameworkNotInstalledError: The framework is not importable.
        BackendLoadError: It is there, but loading it failed; or what was loaded is no backend of that name.
        AmpxError: The plugin itself refuses what it found, and says why.

    Sync: none.
    """
    try:
        backend = found.load()
    except AmpxError:
        raise
    except ImportError as error:
        if error.name is not None and error.name in found.roots and not _is_present(error.name):
            raise FrameworkNotInstalledError(
                f"framework={found.name!r} needs {found.requires}, which is not importable: {error}. Install it with "
                f"`pip install '{found.requires}'`, or as the framework's own instructions say for your GPU.",
                name=error.name,
            ) from error
        raise _load_error(found, error) from error
    except (Exception, SystemExit) as error:
        raise _load_error(found, error) from error
    declared = isinstance(getattr(backend, "capabilities", None), Capabilities)
    if not isinstance(backend, Backend) or not declared or getattr(backend, "name", None) != found.name:
        raise BackendLoadError(
            f"plugin {found.plugin!r} gave {backend!r} for framework {found.name!r}; accepted: an instance of "
            f"ampx.Backend with name={found.name!r} and capabilities. Correct the plugin."
        )
    return backend


def _is_present(root: str) -> bool:
    """Tell whether a module can be found. `from torch import missing` names torch in its ImportError, too."""
    if root in sys.modules:
        return sys.modules[root] is not None
    return importlib.util.find_spec(root) is not None


def _load_error(found: Registration, error: BaseException) -> BackendLoadError:
    return BackendLoadError(
        f"framework={found.name!r} is installed, but loading it failed: {error!r}. It needs {found.requires}; repair "
        f"or reinstall it (`ampx doctor` tells more)."
    )
