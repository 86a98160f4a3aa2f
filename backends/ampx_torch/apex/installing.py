"""The old names: `import apex` finds this package, and `uninstall` puts everything back."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Final

from ampx.errors import AmpxError

_OURS: Final = "ampx_torch.apex"
_PARTS: Final = ("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
_COMPILED: Final = ("amp_C", "apex_C")
# Old names that are not those of a module here.
_OTHER_NAMES: Final = {
    "apex.parallel.LARC": f"{_OURS}.parallel.larc",
    "amp_C": f"{_OURS}.amp_c",
    "apex_C": f"{_OURS}.apex_c",
}


class ApexPresentError(AmpxError, ImportError):
    """An apex is installed here that `install` must not replace unasked, or that cannot be completed."""


@dataclass
class _Installation:
    """What `install` changed.

    Attributes:
        before: The modules of old names that it took out of `sys.modules`.
        names: The old names that it put in.
        attributes: (real module, name) of what it added to a real apex.
        completed: Whether a real apex stayed and was completed.
    """

    before: dict[str, ModuleType] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    attributes: list[tuple[ModuleType, str]] = field(default_factory=list)
    completed: bool = False


_installations: list[_Installation] = []


def install(force: bool = False) -> None:
    """Make `import apex`, `from apex import amp` and `import amp_C` find this package, in this process.

    Where apex is not installed, all of it is supplied. Of an installed apex without `apex.amp`, as it is since
    2025, everything stays that it has; `amp` and the other parts it misses are supplied. An installed apex that
    has `apex.amp` is left alone, and so it is an error to ask. Calling it again changes nothing.

    Args:
        force: Replace an installed apex, whatever it has, and its compiled modules `amp_C` and `apex_C`.

    Raises:
        ApexPresentError: An installed apex has `apex.amp`, or misses it and cannot be imported; and not `force`.

    Sync: none.
    """
    if _installations:
        if not (force and _installations[0].completed):
            return
        uninstall()
    spec = None if force else _find_installed()
    if spec is None:
        _installations.append(_take_over())
        return
    folders = list(spec.submodule_search_locations or [])
    if PathFinder.find_spec("apex.amp", folders) is not None:
        raise ApexPresentError(
            f"install() found an apex that has amp, at {spec.origin}; accepted: an environment without apex, or with "
            f"one that lacks apex.amp. Use that apex as it is, or pass force=True to replace it in this process."
        )
    _installations.append(_complete(spec, folders))


def uninstall() -> None:
    """Undo `install`: the old names mean what they meant before. Without `install` it does nothing. Sync: none."""
    while _installations:
        done = _installations.pop()
        for name in done.names:
            sys.modules.pop(name, None)
        for module, name in done.attributes:
            delattr(module, name)
        sys.modules.update(done.before)


def installed() -> bool:
    """Tell whether the old names are installed. Sync: none."""
    return bool(_installations)


def _find_installed() -> ModuleSpec | None:
    """Find a real apex without importing it."""
    if "apex" in sys.modules:
        return sys.modules["apex"].__spec__
    return importlib.util.find_spec("apex")


def _take_over() -> _Installation:
    modules = _load("apex", set(_COMPILED))
    done = _Installation()
    for name in list(sys.modules):
        if name in ("apex", *_COMPILED) or name.startswith("apex."):
            done.before[name] = sys.modules.pop(name)
    sys.modules.update(modules)
    done.names = list(modules)
    return done


def _complete(spec: ModuleSpec, folders: list[str]) -> _Installation:
    """Give a real apex the parts it misses."""
    missing = [part for part in _PARTS if PathFinder.find_spec(f"apex.{part}", folders) is None]
    compiled = {name for name in _COMPILED if importlib.util.find_spec(name) is None}
    modules: dict[str, ModuleType] = {}
    for part in missing:
        modules.update(_load(f"apex.{part}", compiled))
    done = _Installation(completed=True)
    try:
        real = importlib.import_module("apex")
    except Exception as error:
        raise ApexPresentError(
            f"install() found an apex without amp, at {spec.origin}, that fails to import: {error}; accepted: an apex "
            f"that imports, or none. Repair or remove it, or pass force=True to replace it in this process."
        ) from error
    for part in missing:
        if part not in vars(real):
            setattr(real, part, modules[f"apex.{part}"])
            done.attributes.append((real, part))
    done.names = [name for name in modules if name not in sys.modules]
    sys.modules.update({name: modules[name] for name in done.names})
    return done


def _load(old: str, compiled: set[str]) -> dict[str, ModuleType]:
    """Import our modules that stand for an old name and all below it; gives them by their old names."""
    name = old.replace("apex", _OURS, 1)
    module = importlib.import_module(name)
    found = {old: module}
    for one in pkgutil.walk_packages(module.__path__, f"{name}."):
        found[one.name.replace(_OURS, "apex", 1)] = importlib.import_module(one.name)
    for other, ours in _OTHER_NAMES.items():
        if other in compiled or other.startswith(f"{old}."):
            found[other] = importlib.import_module(ours)
    return found
