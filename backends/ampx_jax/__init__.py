"""JAX backend for ampx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ampx

if TYPE_CHECKING:
    from .handle import float32_parameters as float32_parameters
    from .transform import autocast as autocast


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register JAX."""
    register("jax", load, roots=("jax", "jaxlib", "optax", "flax", "equinox"), requires="jax>=0.9")


def load() -> ampx.Backend:
    """Return the backend, importing jax and optax."""
    from .backend import JaxBackend

    return JaxBackend()


def __getattr__(name: str) -> Any:
    """Load what users call on first use: importing the plugin imports no framework."""
    if name == "autocast":
        from .transform import autocast

        return autocast
    if name == "float32_parameters":
        from .handle import float32_parameters

        return float32_parameters
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
