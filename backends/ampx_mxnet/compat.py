"""Import MXNet where its own import fails: `from ampx_mxnet.compat import mx`.

MXNet 1.9.1 uses two names that NumPy 1.24 removed. NumPy 2 removed many more, and changed what remains.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import warnings
from typing import Any, Final

import numpy as np

from ampx.errors import BackendLoadError

# What MXNet 1.9.1 uses of what NumPy 1.24 removed: `bool` when it is imported, `int` in its test utilities.
REMOVED: Final = ("bool", "int")


def restore_names() -> None:
    """Put back into NumPy the names that MXNet needs, where they are missing.

    Raises:
        BackendLoadError: NumPy is 2.0 or newer.
        ModuleNotFoundError: So it is, and there is no MXNet: an older NumPy would not help.
    """
    if int(np.__version__.partition(".")[0]) >= 2:
        if importlib.util.find_spec("mxnet") is None:
            raise ModuleNotFoundError("No module named 'mxnet'", name="mxnet")
        raise BackendLoadError(
            f"MXNet 1.9.1 does not work with numpy {np.__version__}; accepted: numpy older than 2, in an environment "
            f"of its own. Install it with `pip install 'numpy<2'`."
        )
    for name in REMOVED:
        if name not in vars(np):
            setattr(np, name, getattr(builtins, name))


def __getattr__(name: str) -> Any:
    """Return `mx` and `amp` while they are imported below: `ampx run` loads the backend as soon as mxnet is there."""
    if name in ("mx", "amp"):
        return importlib.import_module("mxnet" if name == "mx" else "mxnet.contrib.amp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


restore_names()
with warnings.catch_warnings():
    # MXNet's import touches names of NumPy that have warned since 1.20, and asks old Pythons' modules for more.
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet as mx
    from mxnet.contrib import amp  # not imported by mxnet itself

__all__ = ["amp", "mx"]
