"""The error of a script that asks the alias for a name it does not have."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from typing import Any

from ampx.errors import UnsupportedByBackendError

ALIAS = __name__.rpartition(".")[0]


class FluidNameError(UnsupportedByBackendError, AttributeError):
    """The alias of `paddle.fluid` has no such name."""


def refuse_missing(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of the alias: it says what the module offers."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        offered = sorted(sys.modules[module].__all__)
        near = difflib.get_close_matches(name, offered, 3)
        raise FluidNameError(
            f"{module.replace(ALIAS, 'paddle.fluid', 1)}.{name} is not in the alias of paddle.fluid that ampx offers"
            f"{f' (near: {chr(44).join(near)})' if near else ''}; there are: {', '.join(offered)}. Use one of these, "
            f"or what Paddle 3 has for it."
        )

    return missing
