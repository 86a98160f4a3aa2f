"""The old name `paddle.fluid`, for which ampx stands in under `ampx run`; the package itself is `ampx_fluid.fluid`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ampx

if TYPE_CHECKING:
    from ampx.plugins import ProvideNames, RegisterNames


@ampx.hookimpl
def ampx_register_names(register: RegisterNames) -> None:
    """Register the name of fluid."""
    register("paddle", load, names=("paddle.fluid",))


def load() -> ProvideNames:
    """Return what lets a script import `paddle.fluid`, importing paddle."""
    from .run import old_names

    return old_names
