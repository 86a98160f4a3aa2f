"""Plugins: the hooks they may implement, how they are found, and how a backend is loaded, one at a time.

Nothing is discovered when ampx is imported; no framework is imported until it is asked for; a plugin that
is broken is reported by its name and breaks nobody else.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pluggy

from .backend import CONTRACTS, Backend, Capabilities, are_offers
from .errors import (
    AmbiguousFrameworkError,
    AmpxError,
    BackendLoadError,
    DuplicateBackendError,
    FrameworkNotInstalledError,
    PluginError,
    UnknownFrameworkError,
)
from .events import Event

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PROJECT = "ampx"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Register(Protocol):
    """The callable that `ampx_register_backends` receives."""

    def __call__(
        self,
        name: str,
        load: Callable[[], Backend],
        *,
        roots: Sequence[str],
        requires: str,
    ) -> None:
        """Register one framework.

        Args:
            name: What `ampx.init(framework=…)` takes.
            load: Gives the backend; the only place where the plugin imports the framework.
            roots: Root modules of the framework's objects, such as `("torch",)`.
            requires: The requirement to install, such as `"torch>=2.7"`.
        """


ProvideNames: TypeAlias = Callable[[Any], AbstractContextManager[Any]]


class RegisterNames(Protocol):
    """The callable that `ampx_register_names` receives."""

    def __call__(self, framework: str, load: Callable[[], ProvideNames], *, names: Sequence[str]) -> None:
        """Register old names for which a plugin stands in where `ampx run` runs a script.

        Args:
            framework: The framework that they train with, as `ampx.init(framework=…)` takes it.
            load: Gives what takes the backend's manager of a run and returns a region in which the script finds the
                names; called where the framework is automated.
            names: The modules, such as `("apex",)`. `ampx run` imports the framework first when the script asks for
                one that stands at the top.
        """


@hookspec
def ampx_register_backends(register: Register) -> None:
    """Register backends: call `register(name, load, roots=…, requires=…)` for each."""


@hookspec
def ampx_register_names(register: RegisterNames) -> None:
    """Register old names: call `register(framework, load, names=…)` for those of each framework."""


@hookspec
def ampx_event(event: Event) -> Any:
    """Receive every event of every framework, in order.

    An exception reaches the user's `step`, when all other plugins and listeners have received the event.
    """


@dataclass(frozen=True)
class Registration:
    """What a plugin said about one framework."""

    name: str
    load: Callable[[], Backend]
    roots: tuple[str, ...]  # root modules of the framework's objects
    requires: str  # the requirement to install
    plugin: str
    module: str  # name of the plugin's module, for messages


@dataclass(frozen=True)
class StandIn:
    """What a plugin said about old names."""

    framework: str
    load: Callable[[], ProvideNames]
    names: tuple[str, ...]
    plugin: str

    @property
    def missing(self) -> tuple[str, ...]:
        """The names that stand at the top: a script imports them without importing the framework first."""
        return tuple(name for name in self.names if "." not in name)


def check_registration(name: object, load: object, roots: object, requires: object) -> None:
    """Check what a plugin passes to `register`."""
    listed = isinstance(roots, (list, tuple, set, frozenset)) and all(isinstance(root, str) for root in roots)
    texts = isinstance(name, str) and isinstance(requires, str)
    if not (listed and roots and texts and callable(load)):
        raise PluginError(
            f"a plugin called register({name!r}, {load!r}, roots={roots!r}, requires={requires!r}); accepted: a name, "
            f"a function without arguments, a tuple of root module names, and a requirement. Correct the plugin."
        )


def implemented_hooks(plugin: Any) -> list[str]:
    """List the functions of a plugin that carry the marker."""
    marker = f"{PROJECT}_impl"
    functions = [name for name in dir(plugin) if inspect.isroutine(getattr(plugin, name, None))]
    return [name for name in functions if hasattr(getattr(plugin, name), marker)]


def _check_hooks(plugin: Any, label: str, module: str) -> None:
    """Raise unless a plugin implements some hooks of ampx, each with the marker, and nothing that is none."""
    hooks = {hook for hook in globals() if hook.startswith("ampx_")}
    marked = implemented_hooks(plugin)
    misspelt = sorted(hook for hook in marked if hook not in hooks)
    if misspelt:
        raise PluginError(
            f"plugin {label!r} (module {module}) implements {', '.join(misspelt)}, which is no hook of ampx; "
            f"accepted: {', '.join(sorted(hooks))}. Correct the name in the plugin."
        )
    present = {hook for hook in hooks if callable(getattr(plugin, hook, None))}
    silent = sorted(present - {*marked, *_CALLED_BY_NAME})
    if silent or not {*marked, *present}:
        lacks = f"{', '.join(silent)} without @ampx.hookimpl" if silent else "no hook of ampx"
        raise PluginError(
            f"plugin {label!r} (module {module}) has {lacks}, so that it would never be called; accepted: a module "
            f"or an object with {' or '.join(sorted(hooks))}, marked by @ampx.hookimpl. Correct the plugin."
        )


def load_backend(registration: Registration) -> Backend:
    """Load a framework's backend."""
    try:
        backend = registration.load()
    except AmpxError:
        raise
    except ImportError as error:
        if error.name is not None and error.name in registration.roots and not _is_present(error.name):
            # A backend may need more than its framework, as that for JAX needs Optax.
            also = "" if error.name == registration.roots[0] else f" {error.name}"
            raise FrameworkNotInstalledError(
                f"framework={registration.name!r} needs {registration.requires}{also and f' and{also}'}, which is not "
                f"importable: {error}. Install it with `pip install '{registration.requires}'{also}`, or as the "
                f"framework's own instructions say for your GPU.",
                name=error.name,
            ) from error
        raise _load_error(registration, error) from error
    except (Exception, SystemExit) as error:
        raise _load_error(registration, error) from error
    _check_backend(backend, registration)
    return backend


def _check_backend(backend: object, registration: Registration) -> None:
    """Raise where a plugin returned something that is no backend of its framework."""
    declared = isinstance(getattr(backend, "capabilities", None), Capabilities)
    if not isinstance(backend, Backend) or not declared or getattr(backend, "name", None) != registration.name:
        raise BackendLoadError(
            f"plugin {registration.plugin!r} gave {backend!r} for framework {registration.name!r}; accepted: an "
            f"instance of ampx.Backend with name={registration.name!r} and capabilities. Correct the plugin."
        )
    if not are_offers(backend.offers):
        raise BackendLoadError(
            f"backend {registration.name!r} of plugin {registration.plugin!r} has offers={backend.offers!r}; accepted: "
            f"a mapping from {', '.join(CONTRACTS)} to 'module:class' or to the class. Correct the plugin."
        )


def _is_present(root: str) -> bool:
    """Return whether a module can be found. `from torch import missing` names torch in its ImportError, too."""
    if root in sys.modules:
        return sys.modules[root] is not None
    return importlib.util.find_spec(root) is not None


def _load_error(registration: Registration, error: BaseException) -> BackendLoadError:
    return BackendLoadError(
        f"framework={registration.name!r} is installed, but loading it failed: {error!r}. It needs "
        f"{registration.requires}; repair or reinstall it (`ampx doctor` tells more)."
    )


# Written by `make table` from what ran, with the manual's page of versions.
TESTED_VERSIONS = Path(__file__).with_name("tested_versions.json")


@dataclass(frozen=True)
class VersionRange:
    """The releases of one distribution that ampx was tested with.

    Attributes:
        lowest: The oldest that is accepted.
        highest: The newest with which the tests passed.
        fails: The oldest above that with which they failed; None where none is known.
    """

    lowest: str
    highest: str
    fails: str | None = None


def version_ranges() -> dict[str, dict[str, VersionRange]]:
    """Return the ranges by framework and distribution."""
    import json  # read where `init` is called, and not where ampx is imported

    data = json.loads(TESTED_VERSIONS.read_text(encoding="utf-8"))
    return {
        framework: {name: VersionRange(**tested) for name, tested in ranges.items()}
        for framework, ranges in data.items()
    }


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare by: those of `"2.13.0+cpu"` and `"2.13.0rc1"` are 2 and 13."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def installed_version(distribution: str) -> str | None:
    """Return which version of a distribution is installed; None where none is."""
    import importlib.metadata  # most of the cost of `import ampx` otherwise

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def known_failure(framework: str, ranges: Mapping[str, Mapping[str, VersionRange]] | None = None) -> str | None:
    """Return what to tell a user whose release of a framework is known to fail; None where none is.

    Args:
        framework: What `ampx.init(framework=…)` takes.
        ranges: The tested ranges; by default those on file.
    """
    for distribution, tested in (version_ranges() if ranges is None else ranges).get(framework, {}).items():
        if tested.fails is None:
            continue
        for name in (distribution, f"{distribution}-cpu", f"{distribution}-gpu"):
            installed = installed_version(name)
            if installed is not None and release(installed) >= release(tested.fails):
                return (
                    f"{name} {installed} is installed, and tests of ampx fail with {tested.fails}; tested: "
                    f"{tested.lowest} to {tested.highest}. Run `pip install '{name}>={tested.lowest},"
                    f"<={tested.highest}'`, or look for a newer release of ampx"
                )
    return None


GROUP = "ampx"
# Called for a plugin when it is registered, marked or not.
_CALLED_BY_NAME = ("ampx_register_backends", "ampx_register_names")
DISABLE_VARIABLE = "AMPX_DISABLE_PLUGINS"


def disabled_plugins() -> set[str]:
    """Return the names of entry points that the environment switches off."""
    return set(filter(None, map(str.strip, os.environ.get(DISABLE_VARIABLE, "").split(","))))


class Registry:
    """Plugins, the frameworks they register, and the backends loaded so far."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        """Remember where to look; nothing is imported yet."""
        self._entry_points = entry_points
        self._manager: pluggy.PluginManager | None = None
        self._registrations: dict[str, Registration] = {}
        self._stand_ins: list[StandIn] = []
        self._backends: dict[str, Backend] = {}
        self.broken: dict[str, AmpxError] = {}
        # The frameworks of which `init` has told, or needed not to tell, that tests fail with the installed release.
        self.versions_told: set[str] = set()
        # The scan imports plugins, which may ask this registry something; other threads wait until it is done.
        self._scanning = threading.RLock()

    @property
    def manager(self) -> pluggy.PluginManager:
        """The pluggy manager, after one scan of the entry points."""
        with self._scanning:
            if self._manager is None:
                self._manager = pluggy.PluginManager(PROJECT)
                self._manager.add_hookspecs(sys.modules[__name__])
                try:
                    self._scan()
                except BaseException:  # Ctrl-C: what was not reached yet would be missing without a word
                    self._manager = None
                    self._registrations.clear()
                    self._stand_ins.clear()
                    self.broken.clear()
                    raise
            return self._manager

    def register_plugin(self, plugin: Any, name: str | None = None) -> None:
        """Register a plugin object (a module, usually) by hand, as entry points do.

        Args:
            plugin: Holds functions marked with `ampx.hookimpl`.
            name: Its name; that of the module by default.

        Raises:
            PluginError: It implements a hook that does not exist, or registering raises.
            DuplicateBackendError: It claims a framework that another plugin has.
        """
        label = name or str(getattr(plugin, "__name__", repr(plugin)))
        module = str(getattr(plugin, "__name__", type(plugin).__module__))
        _check_hooks(plugin, label, module)
        self._add(plugin, label, module)
        claimed: list[Registration] = []
        stand_ins: list[StandIn] = []

        def register(
            name: str,
            load: Callable[[], Backend],
            *,
            roots: Sequence[str],
            requires: str,
        ) -> None:
            check_registration(name, load, roots, requires)
            other = next((entry for entry in (*claimed, *self._registrations.values()) if entry.name == name), None)
            if other is not None:
                raise DuplicateBackendError(
                    f"framework {name!r} is claimed by plugin {label!r} (module {module}) and by plugin "
                    f"{other.plugin!r} (module {other.module}); accepted: one plugin a framework. Uninstall one, or "
                    f"set {DISABLE_VARIABLE}={label}."
                )
            claimed.append(Registration(name, load, tuple(roots), requires, label, module))

        def register_names(framework: str, load: Callable[[], ProvideNames], *, names: Sequence[str]) -> None:
            stand_ins.append(StandIn(framework, load, tuple(names), label))

        try:
            for hook, receiver in zip(_CALLED_BY_NAME, (register, register_names), strict=True):
                ask = getattr(plugin, hook, None)
                if ask is not None:
                    ask(register=receiver)
        except (Exception, SystemExit) as error:
            self.manager.unregister(plugin)
            if isinstance(error, AmpxError):
                raise
            raise PluginError(
                f"plugin {label!r} (module {module}) failed in ampx_register_backends: {error!r}; accepted: calls of "
                f"register(name, load, roots=…, requires=…). Correct or uninstall the plugin."
            ) from error
        self._registrations.update({registration.name: registration for registration in claimed})
        self._stand_ins.extend(stand_ins)

    def _add(self, plugin: Any, label: str, module: str) -> None:
        """Hand a plugin to pluggy."""
        manager = self.manager
        if manager.has_plugin(label) or manager.is_registered(plugin):
            raise PluginError(
                f"plugin {label!r} (module {module}) is registered already; accepted: each plugin once, under a "
                f"name of its own. Remove one registration."
            )
        try:
            manager.register(plugin, name=label)
        except pluggy.PluginValidationError as error:
            if manager.is_registered(plugin):
                manager.unregister(plugin)
            raise PluginError(
                f"plugin {label!r} (module {module}) has a hook with wrong arguments: {error}; accepted: "
                f"ampx_register_backends(register), ampx_register_names(register) and ampx_event(event). Correct the "
                f"plugin."
            ) from error

    def _scan(self) -> None:
        entry_points = self._entry_points
        if entry_points is None:
            import importlib.metadata  # most of the cost of `import ampx` otherwise

            entry_points = importlib.metadata.entry_points(group=GROUP)
        blocked = disabled_plugins()
        for entry_point in entry_points:
            if entry_point.name in blocked:
                continue
            label = entry_point.name
            if self.manager.has_plugin(label):  # another distribution uses the same name for its entry point
                label = f"{entry_point.name} ({entry_point.value})"
            try:
                self.register_plugin(entry_point.load(), label)
            except AmpxError as error:
                self.broken[label] = error
            except (Exception, SystemExit) as error:
                # Whatever an unknown module raises must not reach code that did not ask for it.
                broken = PluginError(
                    f"plugin {entry_point.name!r} ({entry_point.value}) cannot be imported: {error!r}; accepted: a "
                    f"module that imports without its framework. Correct, update or uninstall it, or set "
                    f"{DISABLE_VARIABLE}={entry_point.name}."
                )
                broken.__cause__ = error
                self.broken[label] = broken

    def send(self, event: Event) -> None:
        """Hand an event to the plugins: to all of them, whatever one raises."""
        hook = self.manager.hook.ampx_event
        implementations = hook.get_hookimpls()
        if any(implementation.wrapper or implementation.hookwrapper for implementation in implementations):
            hook(event=event)  # those around others are called by pluggy, which ends with the first that raises
            return
        with ExitStack() as stack:  # which calls the last one first, as pluggy does
            for implementation in implementations:
                stack.callback(implementation.function, **dict.fromkeys(implementation.argnames, event))

    def names(self) -> list[str]:
        """List the registered frameworks."""
        self._ensure()
        return sorted(self._registrations)

    def registration(self, name: str) -> Registration:
        """Look a framework up, importing nothing."""
        self._ensure()
        registration = self._registrations.get(name) if isinstance(name, str) else None
        if registration is not None:
            return registration
        if isinstance(name, str) and name in self.broken:
            raise self.broken[name]
        hint = f" (broken plugins: {', '.join(sorted(self.broken))})" if self.broken else ""
        advice = "install a plugin for it"
        if isinstance(name, str) and name in disabled_plugins():
            hint += f" (switched off by {DISABLE_VARIABLE}: {name})"
            advice = f"take it out of {DISABLE_VARIABLE}"
        raise UnknownFrameworkError(
            f"framework={name!r} is registered by no plugin; accepted: {', '.join(self.names()) or '(none)'}{hint}. "
            f"Pass one of these, or {advice}."
        )

    def stand_ins(self, framework: str) -> list[StandIn]:
        """List what plugins stand in for where a framework is automated, importing nothing."""
        self._ensure()
        return [stand_in for stand_in in self._stand_ins if stand_in.framework == framework]

    def load(self, name: str) -> Backend:
        """Return the backend of a framework, importing the framework where that is new."""
        registration = self.registration(name)
        backend = self._backends.get(name)
        if backend is None:
            backend = self._backends[name] = load_backend(registration)
        return backend

    def imported(self) -> list[str]:
        """List the registered frameworks whose root module is imported already.

        A plugin's own package may be among the roots, for an optimizer that it brings. Finding the plugin imported
        that package, so it does not count.
        """
        self._ensure()
        return [
            name
            for name, registration in sorted(self._registrations.items())
            if any(
                sys.modules.get(root) is not None
                for root in registration.roots
                if root != registration.module.partition(".")[0]
            )
        ]

    def guess(self) -> str:
        """Name the only registered framework that is imported already."""
        candidates = self.imported()
        if len(candidates) == 1:
            return candidates[0]
        names = self.names()
        installed = candidates or [name for name in names if is_installed(self._registrations[name].roots[0])]
        passed = f"imported are {', '.join(candidates)}" if candidates else "no supported framework is imported"
        at_hand = "" if candidates else f" (installed here: {', '.join(installed) or 'none'})"
        raise AmbiguousFrameworkError(
            f"framework was not given, and {passed}; accepted: {', '.join(names) or '(none)'}{at_hand}. Name one: "
            f"ampx.init(framework={(installed or names or ['torch'])[0]!r})."
        )

    def _ensure(self) -> None:
        _ = self.manager


def is_installed(module: str) -> bool:
    """Return whether a module can be found; an empty folder of its name is not one."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


_default: list[Registry] = []


def default_registry() -> Registry:
    """Return the registry of the installed plugins, made on first use."""
    if not _default:
        _default.append(Registry())
    return _default[0]
