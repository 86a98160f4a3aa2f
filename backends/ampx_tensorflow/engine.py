"""Keras runs on several engines; this backend is for one of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ampx.errors import UnsupportedByBackendError


def check_engine() -> None:
    """Raise unless Keras runs on TensorFlow. Called before keras is imported, which imports its engine.

    Raises:
        UnsupportedByBackendError: Keras runs, or would run, on another engine.
    """
    engine = _engine()
    if engine != "tensorflow":
        raise UnsupportedByBackendError(
            f"backend 'tensorflow' was asked for while Keras runs on {engine!r}; accepted: Keras on TensorFlow. Set "
            f"KERAS_BACKEND=tensorflow before keras is imported, or use the framework below Keras: "
            f"ampx.init(framework='torch') or ampx.init(framework='jax') with a training loop of your own."
        )


def _engine() -> str:
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "backend"):
        return str(keras.backend.backend())
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"
