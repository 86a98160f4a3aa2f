"""Which frameworks there are, and which of them are installed, without importing any."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampx.plugins import is_installed

# What ampx is made for. A plugin's frameworks join them.
KNOWN: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "keras", "tf_keras"),
    "mxnet": ("mxnet",),
    "paddle": ("paddle",),
    "jax": ("jax", "optax"),
}


@dataclass(frozen=True)
class Framework:
    """One framework as far as it can be known without importing it."""

    name: str  # what `ampx.init(framework=…)` takes
    module: str
    installed: bool  # the module can be found
    versions: dict[str, str]  # version by distribution, companions (Keras, optax) included
    plugin: str | None = None  # the plugin that registers a backend for it; None where no backend is installed
    requires: str | None = None  # what the backend needs

    @property
    def version(self) -> str | None:
        """Version of the distribution that holds the module; None where it has none."""
        return next(iter(self.versions.values()), None)


def find_frameworks(registrations: Sequence[Mapping[str, Any]]) -> list[Framework]:
    """List the known frameworks and those of plugins, each with what is installed of it."""
    registered = {str(registration["name"]): registration for registration in registrations}
    distributions = importlib.metadata.packages_distributions()
    frameworks = []
    for name in [*KNOWN, *sorted(set(registered) - set(KNOWN))]:
        registration = registered.get(name, {})
        roots = tuple(registration.get("roots", ()))
        module = KNOWN.get(name, roots or (name,))[0]
        modules = dict.fromkeys((module, *KNOWN.get(name, ()), *roots))
        versions = {
            distribution: importlib.metadata.version(distribution)
            for each in modules
            for distribution in sorted(set(distributions.get(each, ())))
        }
        frameworks.append(
            Framework(
                name, module, is_installed(module), versions, registration.get("plugin"), registration.get("requires")
            )
        )
    return frameworks
