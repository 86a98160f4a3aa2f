"""TensorFlow and Keras backend for ampx."""

from __future__ import annotations

import ampx


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register TensorFlow."""
    register("tensorflow", load, roots=("tensorflow", "keras", "tf_keras"), requires="tensorflow>=2.18")


def load() -> ampx.Backend:
    """Give the backend, importing tensorflow and keras."""
    from .engine import check_engine

    check_engine()
    from .backend import TensorFlowBackend

    return TensorFlowBackend()
