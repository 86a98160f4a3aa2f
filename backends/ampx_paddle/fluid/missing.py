"""What a script is told that asks the alias for a name it does not have."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from typing import Any

from ampx.errors import UnsupportedByBackendError


class FluidNameError(UnsupportedByBackendError, AttributeError):
    """The alias of `paddle.fluid` has no such name."""


def refuse_missing(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module of the alias.

    Args:
        module: The module's own name.

    Raises:
        FluidNameError: Always, by what is returned.
    """

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        offered = sorted(one for one in public_names(module))
        near = difflib.get_close_matches(name, offered, 3)
        fluid = module.replace("ampx_paddle.fluid", "paddle.fluid", 1)
        raise FluidNameError(
            f"{fluid}.{name} is not in the alias of paddle.fluid that ampx offers"
            f"{f' (near: {chr(44).join(near)})' if near else ''}; there are: {', '.join(offered)}. Use one of these, "
            f"or what Paddle 3 has for it."
        )

    return missing


def public_names(module: str) -> list[str]:
    """List what a module of the alias offers."""
    names: list[str] = sys.modules[module].__all__
    return names
