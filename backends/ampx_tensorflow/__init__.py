"""TensorFlow and Keras backend for ampx."""

from __future__ import annotations

import os
import sys
from typing import Any

import ampx
from ampx.errors import UnsupportedByBackendError
from ampx.rooms import import_part


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register TensorFlow."""
    register("tensorflow", load, roots=("tensorflow", "keras", "tf_keras"), requires="tensorflow>=2.18")


def load() -> ampx.Backend:
    """Return the backend, importing tensorflow and keras."""
    _check_engine()
    from .backend import TensorFlowBackend

    return TensorFlowBackend()


def _check_engine() -> None:
    """Raise unless Keras runs on TensorFlow, before keras is imported, which imports its engine."""
    engine = _engine()
    if engine != "tensorflow":
        raise UnsupportedByBackendError(
            f"backend 'tensorflow' was asked for while Keras runs on {engine!r}; accepted: Keras on TensorFlow. Set "
            f"KERAS_BACKEND=tensorflow before keras is imported, or use the framework below Keras: "
            f"ampx.init(framework='torch') or ampx.init(framework='jax') with a training loop of your own."
        )


def _engine() -> str:
    backend = getattr(sys.modules.get("keras"), "backend", None)  # a keras that is being imported may have none yet
    if backend is not None:
        return str(backend.backend())
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    import json  # with every import of ampx, plugins are imported
    from pathlib import Path

    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def install(dtype: object = "auto", device: str = "auto") -> None:
    """Make the names of TensorFlow 1 and Keras 2 work, with ampx underneath: see `old.names`."""
    load()
    names = import_part("ampx_tensorflow.old.names", "ampx_tensorflow.install")
    names.install(dtype, device)


def uninstall() -> None:
    """Leave TensorFlow and Keras as they were before `install`."""
    load()
    names = import_part("ampx_tensorflow.old.names", "ampx_tensorflow.uninstall")
    names.uninstall()


def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic", **options: Any) -> Any:
    """Cast every graph from now on, and give an optimizer that scales the loss: see `old.graph_rewrite`.

    Sync: one, the first time.
    """
    load()
    graph_rewrite = import_part(
        "ampx_tensorflow.old.graph_rewrite", "ampx_tensorflow.enable_mixed_precision_graph_rewrite"
    )
    return graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale, **options)


def disable_mixed_precision_graph_rewrite() -> None:
    """Cast no graphs from now on; optimizers go on to scale their loss. Sync: as `Amp.shutdown`."""
    load()
    graph_rewrite = import_part(
        "ampx_tensorflow.old.graph_rewrite", "ampx_tensorflow.disable_mixed_precision_graph_rewrite"
    )
    graph_rewrite.disable_mixed_precision_graph_rewrite()
