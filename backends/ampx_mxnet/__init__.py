"""Apache MXNet backend for ampx."""

from __future__ import annotations

import ampx


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register MXNet."""
    register("mxnet", load, roots=("mxnet",), requires="mxnet==1.9.1")


def load() -> ampx.Backend:
    """Return the backend, importing mxnet."""
    from .backend import MXNetBackend

    return MXNetBackend()
