"""A GPU for tests where there is none: MXNet casts, trains and skips in float16 on contexts that `mx.gpu` returns.

MXNet's CPU build has float16 kernels for its elementwise operators, reductions, norms, its test for finiteness and its
optimizers, and they compute here. It has none for products: a product of float16 arrays is computed in float32 and
rounded to the nearest float16, and so are its gradients. Graphs are changed only where they are run; what casting,
tracing and conversion make of them is what a GPU would be given. The memory is the host's.

What tests show here is which operations run in which dtype, what is in float16 memory and overflows there, and what a
step does with it. They say nothing of CUDA's kernels and of how they add up, of speed, memory, streams and waits, of
NCCL, nor of whether arrays of host and device are kept apart.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Final

from compiled import CannotSimulateError

GPUS: Final = 2
# These are contexts of the CPU, with numbers that no test uses otherwise.
FIRST: Final = 64
# What MXNet's CPU build computes in float32 and float64 only.
PRODUCTS: Final = (
    "Convolution",
    "Deconvolution",
    "FullyConnected",
    "batch_dot",
    "dot",
    "_linalg_gemm",
    "_linalg_gemm2",
)
_started = False


def start(folder: pathlib.Path | None = None) -> None:
    """Give this process the GPUs; nothing is compiled for them, and `folder` not used.

    Raises:
        CannotSimulateError: MXNet is missing, or was imported before and has already chosen its kernels.
    """
    if importlib.util.find_spec("mxnet") is None:
        raise CannotSimulateError("there is no mxnet")
    if "mxnet" in sys.modules:
        raise CannotSimulateError("mxnet was imported before the simulated GPU, and chooses its kernels once")
    os.environ["MXNET_MKLDNN_ENABLED"] = "0"  # oneDNN's kernels for MXNet's casts know no float16
    os.environ["MXNET_STORAGE_FALLBACK_LOG_VERBOSE"] = "0"  # MXNet tells of each operator that does without
    from ampx_mxnet.compat import mx

    _offer(mx)
    handles = {_handle(mx, name) for name in PRODUCTS}
    mx.ndarray.register._imperative_invoke = _called(mx, mx.ndarray.register._imperative_invoke, handles)
    mx.ndarray.CachedOp.__init__ = _compiled(mx, mx.ndarray.CachedOp.__init__)
    global _started
    _started = True


def started() -> bool:
    """Return whether this process has the GPUs."""
    return _started


def _offer(mx: Any) -> None:
    """Let MXNet answer in Python as its GPU build does where there are GPUs."""
    native = mx.Context.__init__

    @functools.wraps(native)
    def init(context: Any, device_type: Any, device_id: int = 0) -> None:
        if device_type == "gpu":
            device_type, device_id = "cpu", device_id if device_id >= FIRST else FIRST + device_id
        native(context, device_type, device_id)

    kind = mx.Context.device_type.fget
    mx.Context.__init__ = init
    mx.Context.device_type = property(lambda context: "gpu" if context.device_id >= FIRST else kind(context))
    mx.num_gpus = mx.context.num_gpus = lambda: GPUS


def _handle(mx: Any, name: str) -> int:
    """Return MXNet's number of an operator."""
    handle = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    assert handle.value is not None
    return handle.value


# -- operators that a script calls -------------------------------------------------------------------------------------


def _called(mx: Any, native: Callable[..., Any], handles: set[int]) -> Callable[..., Any]:
    """Return what runs operators, for products of float16 arrays too."""
    import numpy as np  # the test session of the core, which has none, imports this module

    @functools.wraps(native)
    def called(handle: int, arrays: Any, keys: Any, values: Any, out: Any, *rest: Any) -> Any:
        # MXNet's library reads contexts by their names, and has no GPU.
        values = [f"c{str(value)[1:]}" if str(value).startswith("gpu(") else value for value in values]
        if handle not in handles or out is not None or any(array.dtype is not np.float16 for array in arrays):
            return native(handle, arrays, keys, values, out, *rest)
        wide = [cast(array, "float32") for array in arrays]
        return cast(native(handle, wide, keys, values, None, *rest), "float16")

    cast = mx.nd.NDArray.astype
    return called


# -- operators of a graph ----------------------------------------------------------------------------------------------


def _compiled(mx: Any, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a traced graph run, with products that take float16 too."""

    @functools.wraps(native)
    def compiled(operator: Any, symbol: Any, flags: Any = ()) -> None:
        changed = mx.sym.load_json(widened(symbol.tojson(remove_amp_cast=False)))
        native(operator, type(symbol)(changed.handle) if type(symbol) is not type(changed) else changed, flags)

    return compiled


def widened(graph: str) -> str:
    """Return a graph, as JSON, in which products compute in float32 and have results of their first factor's dtype.

    A graph does not know its dtypes. Casts from float32 to float32 change nothing, and of a result and a factor MXNet's
    own `amp_multicast` finds the narrower dtype.
    """
    content = json.loads(graph)
    nodes: list[dict[str, Any]] = []
    moved: list[int] = []  # by a node's old number, the new one of that which has its result

    def add(op: str, name: str, inputs: list[list[int]], **attributes: str) -> list[int]:
        nodes.append({"op": op, "name": name, "attrs": attributes, "inputs": inputs})
        return [len(nodes) - 1, 0, 0]

    for node in content["nodes"]:
        name, inputs = node["name"], [[moved[number], *rest] for number, *rest in node["inputs"]]
        if node["op"] in PRODUCTS:
            wide = [add("Cast", f"{name}_wide{n}", [entry], dtype="float32") for n, entry in enumerate(inputs)]
            pair = [add(node["op"], name, wide, **node.get("attrs", {})), add("BlockGrad", f"{name}_low", inputs[:1])]
            add("amp_multicast", f"{name}_narrow", pair, num_outputs="2", cast_narrow="True")
        else:
            nodes.append({**node, "inputs": inputs})
        moved.append(len(nodes) - 1)
    return json.dumps(
        {
            "nodes": nodes,
            "arg_nodes": [number for number, node in enumerate(nodes) if node["op"] == "null"],
            "heads": [[moved[number], *rest] for number, *rest in content["heads"]],
            "attrs": content.get("attrs", {}),
        }
    )
