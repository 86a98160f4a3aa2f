"""TensorFlow and Keras backend for ampx."""

from __future__ import annotations

from typing import Any

import ampx


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register TensorFlow."""
    register("tensorflow", load, roots=("tensorflow", "keras", "tf_keras"), requires="tensorflow>=2.18")


def load() -> ampx.Backend:
    """Return the backend, importing tensorflow and keras."""
    from .engine import check_engine

    check_engine()
    from .backend import TensorFlowBackend

    return TensorFlowBackend()


def install(dtype: object = "auto", device: str = "auto") -> None:
    """Make the names of TensorFlow 1 and Keras 2 work, with ampx underneath: see `old_names`."""
    _old_names().install(dtype, device)


def uninstall() -> None:
    """Leave TensorFlow and Keras as they were before `install`."""
    _old_names().uninstall()


def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic", **options: Any) -> Any:
    """Cast every graph from now on, and give an optimizer that scales the loss: see `graph_rewrite`.

    Sync: one, the first time.
    """
    return _graph_rewrite().enable_mixed_precision_graph_rewrite(opt, loss_scale, **options)


def disable_mixed_precision_graph_rewrite() -> None:
    """Cast no graphs from now on; optimizers go on to scale their loss. Sync: as `Amp.shutdown`."""
    _graph_rewrite().disable_mixed_precision_graph_rewrite()


def _old_names() -> Any:
    load()
    from . import old_names  # like the backend, this imports TensorFlow

    return old_names


def _graph_rewrite() -> Any:
    load()
    from . import graph_rewrite

    return graph_rewrite
