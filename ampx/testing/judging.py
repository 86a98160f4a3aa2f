"""Show mutants to the kit."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, settings

import ampx
from ampx.plugins import default_registry

from .base import KitTests
from .suite import BackendSuite
from .toy.mutation import Mutant


class _Plugin:
    """Registers one mutant."""

    def __init__(self, name: str, backend: type[ampx.Backend]) -> None:
        self.name = name
        self.backend = backend

    @ampx.hookimpl
    def ampx_register_backends(self, register: ampx.Register) -> None:
        """Register it."""
        register(self.name, self.backend, roots=("ampx",), requires="ampx")


def suite_for(mutant: Mutant, base: type[KitTests] = BackendSuite, **attributes: Any) -> type[KitTests]:
    """Return the suite of a mutant, with few and unshrunk random cases."""
    name = f"mutant-{mutant.name}"
    backend = type(mutant.name, (mutant.backend,), {"name": name})
    if name not in default_registry().names():
        ampx.register_plugin(_Plugin(name, backend), name)
    harness = type(f"{mutant.name}Harness", (mutant.harness,), {"framework": name})
    few = settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )
    return type(f"{mutant.name}Suite", (base,), {"harness": harness, "hypothesis": few, **attributes})
