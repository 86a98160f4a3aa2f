"""The toy's plugin; imports no framework, as every plugin. Nothing registers it but the kit."""

from __future__ import annotations

import ampx


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register the variants of the toy framework."""
    register("toy", load_implicit, roots=("toy",), requires="ampx")
    register("toy-explicit", load_explicit, roots=("toy",), requires="ampx")
    register("toy-bare", load_bare, roots=("toy",), requires="ampx")


def load_implicit() -> ampx.Backend:
    """Return the backend whose gradients hang on the parameters."""
    from .implicit import ImplicitToy

    return ImplicitToy()


def load_explicit() -> ampx.Backend:
    """Return the backend whose gradients are values."""
    from .explicit import ExplicitToy

    return ExplicitToy()


def load_bare() -> ampx.Backend:
    """Return the backend that only scales losses."""
    from .explicit import BareToy

    return BareToy()
