"""What `ampx doctor` finds out."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import ampx
from ampx.errors import UnknownFrameworkError
from ampx.plugins import disabled_plugins, known_failure
from ampx.run.machine import describe_machine

from .frameworks import Framework, find_frameworks
from .installation import other_distributions
from .probe import TIME_LIMIT, probe

SCHEMA = "ampx.doctor/1"


def examine(only: str | None = None, time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """Examine the machine, the plugins and the frameworks.

    Sync: as the frameworks' own questions about their devices.
    """
    scan = probe("plugins", time_limit=time_limit)
    frameworks = _select(find_frameworks(scan.get("registered", ())), only)
    with ThreadPoolExecutor(max_workers=4) as pool:
        examined = list(pool.map(lambda framework: examine_framework(framework, time_limit), frameworks))
    return {
        "schema": SCHEMA,
        "ampx": ampx.__version__,
        "others": other_distributions(),
        "machine": describe_machine(),
        "plugins": {
            "found": scan.get("plugins", []),
            "disabled": sorted(disabled_plugins()),
            "broken": scan.get("broken", {}),
            "error": scan.get("error"),
        },
        "frameworks": examined,
        "mixed_precision": any(framework["mixed_precision"] != "none" for framework in examined),
    }


def _select(frameworks: list[Framework], only: str | None) -> list[Framework]:
    chosen = [framework for framework in frameworks if only in (None, framework.name)]
    if not chosen:
        raise UnknownFrameworkError(
            f"framework={only!r} is not known and no plugin registers it; accepted: "
            f"{', '.join(framework.name for framework in frameworks)}. Pass one of these, or install a plugin for it."
        )
    return chosen


def examine_framework(
    framework: Framework, time_limit: float = TIME_LIMIT, ask: Callable[..., dict[str, Any]] = probe
) -> dict[str, Any]:
    """Examine one framework, importing it in a process of its own if it is installed.

    Returns:
        What `Framework` holds, and `state` (`"ready"`, `"no backend"`, `"broken"`, `"not installed"`), `problem`,
        `known_failure` (what to tell where tests of ampx fail with the installed release), `devices`,
        `absent_devices`, `init`, `unusable_offers` (by name, why they cannot be loaded), and `mixed_precision`:
        `"native"`, `"emulated"` or `"none"`.
    """
    facts: dict[str, Any] = {**asdict(framework), "version": framework.version}
    answer: dict[str, Any] = {}
    if not framework.installed:
        state = "broken" if framework.version and _holds(framework) else "not installed"
        answer = {"error": f"the module {framework.module} is missing"} if state == "broken" else {}
    else:
        answer = ask("framework", framework.name, framework.module, framework.plugin is not None, time_limit=time_limit)
        state = "broken" if "error" in answer else "ready" if framework.plugin else "no backend"
    devices = answer.get("devices", [])
    facts.update(
        version=facts["version"] or answer.get("version"),
        state=state,
        problem=answer.get("error"),
        known_failure=known_failure(framework.name) if framework.installed else None,
        devices=devices,
        absent_devices=answer.get("absent", {}),
        init=answer.get("init"),
        unusable_offers=answer.get("unusable_offers", {}),
        mixed_precision=_precision(devices) if state == "ready" and answer["init"]["level"] != "O0" else "none",
    )
    return facts


def _holds(framework: Framework) -> bool:
    """Return whether some distribution says that it holds the framework's module."""
    owners = importlib.metadata.packages_distributions().get(framework.module, ())
    return any(owner in framework.versions for owner in owners)


def _precision(devices: list[dict[str, Any]]) -> str:
    if any(device["native"] for device in devices):
        return "native"
    return "emulated" if any(device["emulated"] for device in devices) else "none"
