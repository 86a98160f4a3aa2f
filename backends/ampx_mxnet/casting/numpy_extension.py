"""Products of MXNet's NumPy-like interface, which its amp overlooks: cast as the operators of its lists are.

They return float32: hardly any function of that interface has a kernel in bfloat16.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

from ampx.backend import map_leaves
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import DTYPES

# What the operators of MXNet's lists are called there, those that are called otherwise.
_NAMES: Final = {
    "Convolution": "convolution",
    "Deconvolution": "deconvolution",
    "FullyConnected": "fully_connected",
    "RNN": "rnn",
}
# The dtype in which the calling thread computed last, for code that looks at float32 outputs.
computed: Final = threading.local()


def modules() -> list[ModuleType]:
    """List the modules that hold the functions: for arrays of users, and for arrays and symbols of gluon."""
    return [place for module in (mx.npx, mx.nd.npx, mx.sym.npx) for place in (module, module._op)]


def lower(operators: Iterable[str], dtype: Any) -> None:
    """Replace the functions of some operators by such that compute in a dtype."""
    for module in modules():
        for operator in operators:
            name = _NAMES.get(operator, operator)
            if inspect.isfunction(function := vars(module).get(name)):
                setattr(module, name, _lowered(function, dtype))


def _lowered(function: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        computed.dtype = dtype
        args, kwargs = map_leaves((args, kwargs), lambda leaf: _cast(leaf, DTYPES[dtype]))
        return map_leaves(function(*args, **kwargs), lambda leaf: _cast(leaf, DTYPES["float32"]))

    return compute


def _cast(leaf: Any, dtype: Any) -> Any:
    if isinstance(leaf, (mx.nd.NDArray, mx.sym.Symbol)):  # integers stay
        cast = mx.nd.amp_cast if isinstance(leaf, mx.nd.NDArray) else mx.sym.amp_cast
        return cast(leaf.as_nd_ndarray(), dtype=dtype).as_np_ndarray()
    return leaf
