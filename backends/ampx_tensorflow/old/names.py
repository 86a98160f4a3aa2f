"""`ampx_tensorflow.install()`: the mixed precision of TensorFlow 1 and Keras 2 under its names of then."""

from __future__ import annotations

import functools
import importlib
import sys
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import tensorflow as tf

from . import graph_rewrite, keras2

_MIXED_PRECISION: Final = (
    "keras.mixed_precision",
    "keras._tf_keras.keras.mixed_precision",
    "tensorflow.keras.mixed_precision",
)


class _Installed:
    """What to undo."""

    def __init__(self) -> None:
        self.undo: ExitStack | None = None


_installed = _Installed()


def install(dtype: object = "auto", device: str = "auto") -> None:
    """Make the old names work, with ampx underneath; a second call replaces the first.

    Args:
        dtype: As in `ampx.init`, for `enable_mixed_precision_graph_rewrite`.
        device: As in `ampx.init`, for the same.
    """
    uninstall()
    enable = functools.partial(graph_rewrite.enable_mixed_precision_graph_rewrite, dtype=dtype, device=device)
    disable = graph_rewrite.disable_mixed_precision_graph_rewrite
    functions = {
        "enable_mixed_precision_graph_rewrite": enable,
        "disable_mixed_precision_graph_rewrite": disable,
    }
    v1, experimental = tf.compat.v1, keras2.experimental()
    with ExitStack() as undo:
        for module in (tf.train.experimental, v1.train.experimental, v1.mixed_precision):
            _set(undo, module, functions)
        _set(undo, tf.train.experimental, keras2.loss_scales())
        scales = SimpleNamespace(**keras2.loss_scales())
        _set(undo, tf, {"mixed_precision": SimpleNamespace(experimental=scales, **functions)})
        for name in _MIXED_PRECISION:
            module = importlib.import_module(name)
            _set(undo, module, {"experimental": experimental, "LossScaleOptimizer": keras2.LossScaleOptimizer})
            _import_as(undo, f"{name}.experimental", experimental)
        _installed.undo = undo.pop_all()


def uninstall() -> None:
    """Leave TensorFlow and Keras as they were before `install`; without one, do nothing.

    What was enabled stays enabled: `disable_mixed_precision_graph_rewrite` or `ampx.shutdown` ends it.
    """
    undo, _installed.undo = _installed.undo, None
    if undo is not None:
        undo.close()


def _set(undo: ExitStack, module: Any, names: dict[str, Any]) -> None:
    for name, value in names.items():
        if name in vars(module) or hasattr(module, name):
            undo.callback(setattr, module, name, getattr(module, name))
        else:
            undo.callback(delattr, module, name)
        setattr(module, name, value)


def _import_as(undo: ExitStack, name: str, module: ModuleType) -> None:
    before = sys.modules.get(name)
    if before is None:
        undo.callback(sys.modules.pop, name, None)
    else:
        undo.callback(sys.modules.__setitem__, name, before)
    sys.modules[name] = module
