"""PaddlePaddle backend for ampx."""

from __future__ import annotations

import ampx


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register PaddlePaddle."""
    register("paddle", load, roots=("paddle",), requires="paddlepaddle>=3.3")


def load() -> ampx.Backend:
    """Return the backend, importing paddle."""
    from . import sot
    from .backend import PaddleBackend

    sot.run_as_written()
    return PaddleBackend()
