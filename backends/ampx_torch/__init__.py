"""PyTorch backend for ampx."""

from __future__ import annotations

import ampx


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register PyTorch."""
    register("torch", load, roots=("torch",), requires="torch>=2.7")


def load() -> ampx.Backend:
    """Return the backend, importing torch."""
    from .backend import TorchBackend

    return TorchBackend()
