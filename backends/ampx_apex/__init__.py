"""The old names of NVIDIA apex, for which ampx stands in under `ampx run`; the package itself is `ampx_apex.apex`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ampx

if TYPE_CHECKING:
    from ampx.plugins import ProvideNames, RegisterNames


@ampx.hookimpl
def ampx_register_names(register: RegisterNames) -> None:
    """Register the names of apex."""
    register("torch", load, names=("apex",))


def load() -> ProvideNames:
    """Return what lets a script import apex, importing torch."""
    from .run import old_names

    return old_names
