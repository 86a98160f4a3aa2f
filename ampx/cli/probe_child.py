"""What runs in the child process of `probe`."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import ampx
from ampx.backend import CONTRACTS, Backend, find_offer, offer
from ampx.plugins import default_registry
from ampx.policy import OptLevel
from ampx.rooms import is_there


def run(question: str, arguments: list[Any]) -> None:
    """Answer one question and write the answer, in one piece, to the file that comes first in the arguments."""
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "plugins": plugins,
        "framework": framework,
        "capabilities": capabilities,
        "demo": demo,
        "has_demo": has_demo,
    }
    target, *rest = arguments
    text = json.dumps(answers[question](*rest), default=_plain)
    unfinished = Path(f"{target}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(target)


def plugins() -> dict[str, Any]:
    """Return which plugins there are, what they register, and which are broken."""
    registry = default_registry()
    registrations = [registry.registration(name) for name in registry.names()]
    return {
        "plugins": sorted(name for name, plugin in registry.manager.list_name_plugin() if plugin is not None),
        "registered": [
            {
                "name": registration.name,
                "roots": registration.roots,
                "requires": registration.requires,
                "plugin": registration.plugin,
                "module": registration.module,
            }
            for registration in registrations
        ],
        "broken": {name: str(error) for name, error in registry.broken.items()},
    }


def framework(name: str, module: str, has_backend: bool) -> dict[str, Any]:
    """Import a framework and its backend; return its devices and what `init` would choose."""
    answer: dict[str, Any] = {}
    try:
        # The backend comes first: it may have to make its framework importable, as MXNet's does.
        backend = default_registry().load(name) if has_backend else None
        answer["version"] = getattr(importlib.import_module(module), "__version__", None)
    except BaseException as error:  # SystemExit included: an import must not decide how this process ends
        if module in sys.modules:
            answer["version"] = getattr(sys.modules[module], "__version__", None)
            return {**answer, "error": f"its ampx backend failed: {_describe(error)}"}
        cause = error.__cause__ if isinstance(error, ampx.AmpxError) else None
        return {"error": f"importing {module} raised {_describe(cause or error)}"}
    if backend is None:
        return answer
    try:
        answer["capabilities"], answer["offers"] = describe_capabilities(backend), list(backend.offers)
        answer["devices"], answer["absent"] = _devices(backend)
        answer["init"] = _init(name, backend)
        answer["unusable_offers"] = _unusable_offers(backend)
    except Exception as error:
        answer["error"] = f"its ampx backend failed: {_describe(error)}"
    return answer


def capabilities(name: str) -> dict[str, Any]:
    """Return what a backend declares."""
    try:
        backend = default_registry().load(name)
        return {"capabilities": describe_capabilities(backend), "offers": list(backend.offers)}
    except ampx.AmpxError as error:
        return {"error": str(error)}


def has_demo(name: str) -> dict[str, Any]:
    """Return whether a backend can be loaded and has a trainer for the demo."""
    from .demo import Demo

    try:
        offer(default_registry().load(name), Demo)
    except ampx.AmpxError:
        return {"demo": False}
    return {"demo": True}


def demo(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train as `ampx demo --framework` does; return the report and the warnings about precision."""
    from .demo import Demo
    from .demo_command import train

    try:
        offer(default_registry().load(name), Demo)
    except ampx.UnsupportedByBackendError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": _describe(error)}
    try:
        report, notes = train(name, **options)
    except ampx.AmpxError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": _describe(error)}
    return {"report": report, "notes": notes}


def describe_capabilities(backend: Backend) -> dict[str, Any]:
    """Return the declaration of a backend as plain values, in the order of the fields."""
    declared = backend.capabilities
    return {field.name: _plain(getattr(declared, field.name)) for field in fields(declared)}


def _devices(backend: Backend) -> tuple[list[dict[str, Any]], dict[str, str]]:
    present, absent = [], {}
    for kind in backend.capabilities.devices:
        try:
            device = backend.device(kind)
        except ampx.UnsupportedDeviceError as error:
            absent[kind] = str(error)
        else:
            present.append({**{field.name: getattr(device, field.name) for field in fields(device)}})
    return present, absent


def _unusable_offers(backend: Backend) -> dict[str, str]:
    """Return, by name, why what a backend offers cannot be loaded."""
    reasons = {}
    for name, place in backend.offers.items():
        if not is_there(CONTRACTS[name].partition(":")[0]):
            continue  # nobody asks for it: the feature has been taken out of ampx
        try:
            if find_offer(backend, pkgutil.resolve_name(CONTRACTS[name])) is None:
                reasons[name] = f"{place} is not in this installation"
        except (Exception, SystemExit) as error:
            reasons[name] = _describe(error)
    return reasons


def _init(name: str, backend: Backend) -> dict[str, Any]:
    """Return what `init` chooses at its default level; where a backend does not declare that, at the next it does."""
    declared = backend.capabilities.levels
    levels: tuple[OptLevel, ...] = ("O1", "O2", "O3", "O0")
    level = next((level for level in levels if level in declared), levels[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)  # the reason says the same
        with ampx.init(framework=name, level=level) as amp:
            chosen = amp.effective
    return {
        "device": chosen.device,
        "dtype": chosen.dtype,
        "level": chosen.level,
        "dynamic": chosen.loss_scale.dynamic,
        "init_scale": chosen.loss_scale.init_scale,
        "reason": "its backend declares level O0 only, which casts nothing" if level == "O0" else chosen.reason,
    }


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None), list, dict)):
        return value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if hasattr(value, "keys") else str(value)
